"""`attention` agrees with its oracle on inputs that hypothesis generates.

Shapes, strides, masks, options, dtypes and the number of threads are drawn together. The draw is
derandomized: every run tests the same inputs.
"""

import pytest
import torch
from fusedseq.testing import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SOMETIMES = st.sampled_from([False, False, True])
DTYPES = st.sampled_from(
    [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
# Lengths on both sides of the kernels' vector, tile and block sizes.
LENGTHS = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 31, 33, 48, 49, 65, 97]))
HEAD_DIMS = st.one_of(st.integers(1, 12), st.sampled_from([15, 16, 17, 20, 32, 60, 64, 65]))


class Tensors:
    """Makes tensors of seeded random numbers, in a memory layout that is drawn."""

    def __init__(self, draw):
        self.draw, self.generator = draw, torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def randn(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def rand(self, *shape):
        return torch.rand(shape, generator=self.generator)

    def laid_out(self, t):
        """The same numbers as a view: permuted, and part of a larger tensor or strided."""
        order = self.draw(st.permutations(range(t.dim())))
        inverse = [order.index(d) for d in range(t.dim())]
        t = t.permute(order).contiguous().permute(inverse)
        d = self.draw(st.integers(0, t.dim() - 1))
        layout = self.draw(st.sampled_from(["whole", "part", "strided"]))
        if layout == "part":
            return torch.cat([t, torch.full_like(t, 7)], dim=d).narrow(d, 0, t.size(d))
        if layout == "strided":
            pairs = torch.stack([t, torch.full_like(t, 7)], dim=d + 1)
            return pairs.flatten(d, d + 1).unflatten(d, (t.size(d), 2)).select(d + 1, 0)
        return t


@st.composite
def calls(draw):
    """(q, k, v) and the operator's options; B and N are small, so that many lengths are tested."""
    tensors = Tensors(draw)
    randn, on = tensors.randn, lambda: draw(SOMETIMES)
    B, N_kv = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    N = N_kv * draw(st.sampled_from([1, 1, 2, 3]))
    L, S, D = draw(LENGTHS), draw(LENGTHS), draw(HEAD_DIMS)
    empty = draw(st.integers(0, 39))
    N, N_kv = (0, 0) if empty == 36 else (N, N_kv)
    L, S, D = L * (empty != 37), S * (empty != 38), D * (empty != 39)
    options = {"causal": on()}

    def broadcast():
        """A shape that broadcasts to (B, N, L, S)."""
        whole = B, N, L, S
        return [n if draw(st.booleans()) else 1 for n in whole][draw(st.integers(0, 3)) :]

    if on():
        options["offset"] = draw(st.integers(0, 5) if D % 2 == 0 else st.integers(-5, 5))
    if on():
        options["scale"] = draw(st.sampled_from([0.0, 0.1, -0.5, 1.0]))
    if on():
        options["key_lengths"] = torch.tensor(
            [draw(st.integers(0, S)) for _ in range(B)], dtype=torch.int64
        )
    if on():
        options["mask"] = tensors.laid_out(
            tensors.rand(*broadcast()) < draw(st.sampled_from([0.0, 0.3, 0.9]))
        )
    if on():
        bias = randn(*broadcast())
        options["bias"] = tensors.laid_out(
            bias.masked_fill(tensors.rand(*bias.shape) < 0.1, -torch.inf) if on() else bias
        )
    if on():
        options["alibi"] = tensors.rand(N)
    if on():
        options["relative_keys"] = randn(2 * draw(st.integers(0, 7)) + 1, D)
    if on() and D > 1 and options.get("offset", S - L) >= 0:
        R = 2 * draw(st.sampled_from([D // 2, D // 2, 1 + draw(st.integers(0, D // 2 - 1))]))
        angles = 6.28 * tensors.rand(max(S, L + options.get("offset", S - L)), R // 2)
        options["rope"] = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
        options["rope_interleaved"] = draw(st.booleans())
    if on():
        options |= {
            "dropout": draw(st.sampled_from([0.1, 0.5, 1.0])),
            "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        }
    q, k, v = (randn(B, n, length, D) for n, length in ((N, L), (N_kv, S), (N_kv, S)))
    exact_logits = not {"rope", "relative_keys"} & options.keys()
    if on() and exact_logits:  # a saturated softmax; the logits are exact in any order of summation
        q, k = 16 * (4 * q).round() / 4, (4 * k).round() / 4
        options["scale"] = 1.0
    q, k, v = map(tensors.laid_out, (q, k, v))
    dtype = draw(DTYPES)
    return [t.to(dtype) for t in (q, k, v)], {
        name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for name, t in options.items()
    }


@pytest.fixture(autouse=True)
def _one_thread_after():
    yield
    torch.set_num_threads(1)


@settings(
    max_examples=400,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(calls(), st.sampled_from([1, 2, 3]))
def test_agrees_with_the_oracle(call, threads):
    torch.set_num_threads(threads)
    # One gradient may be a sum of large terms to 0, as that of a bias that is constant over the
    # keys. The gradients are compared as one vector, whose scale the other gradients give.
    check("attention", *call, together=True)
