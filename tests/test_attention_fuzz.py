"""attention against its oracle on inputs that hypothesis makes up: shapes, strides, masks, options, dtypes together.
Derandomised: the same inputs at every run."""

import pytest
import torch
from fusedseq.testing import check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

OFTEN_OFF = st.sampled_from([False, False, True])
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
# Lengths on both sides of what is a vector, a tile or a block of the kernels.
LENGTHS = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 31, 33, 48, 49, 65, 97]))
HEAD_DIMS = st.one_of(st.integers(1, 12), st.sampled_from([15, 16, 17, 20, 32, 60, 64, 65]))


class Numbers:
    """Tensors of seeded numbers, each lying in memory in a way that is drawn."""

    def __init__(self, draw):
        self.draw, self.generator = draw, torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def randn(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def rand(self, *shape):
        return torch.rand(shape, generator=self.generator)

    def laid_out(self, t):
        """The same numbers: the dimensions in another order in memory, inside a larger tensor, or every other one."""
        order = self.draw(st.permutations(range(t.dim())))
        back = [order.index(d) for d in range(t.dim())]
        t = t.permute(order).contiguous().permute(back)
        d = self.draw(st.integers(0, t.dim() - 1))
        way = self.draw(st.sampled_from(["whole", "part", "steps"]))
        if way == "part":
            return torch.cat([t, torch.full_like(t, 7)], dim=d).narrow(d, 0, t.size(d))
        if way == "steps":
            return (
                torch.stack([t, torch.full_like(t, 7)], dim=d + 1)
                .flatten(d, d + 1)
                .unflatten(d, (-1, 2))
                .select(d + 1, 0)
            )
        return t


@st.composite
def calls(draw):
    """q, k, v and the operator's options; heads and rows few, so that many lengths are seen."""
    numbers = Numbers(draw)
    randn, on = numbers.randn, lambda: draw(OFTEN_OFF)
    B, N_kv, group = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    N, L, S, D = N_kv * group, draw(LENGTHS), draw(LENGTHS), draw(HEAD_DIMS)
    options = {"causal": on()}
    whole = (B, N, L, S)

    def broadcast():
        return [n if draw(st.booleans()) else 1 for n in whole][draw(st.integers(0, 3)) :]

    if on():
        options["offset"] = draw(st.integers(0, 5) if D % 2 == 0 else st.integers(-5, 5))
    if on():
        options["scale"] = draw(st.sampled_from([0.0, 0.1, -0.5, 1.0]))
    if on():
        options["key_lengths"] = torch.tensor([draw(st.integers(0, S)) for _ in range(B)], dtype=torch.int64)
    if on():
        options["mask"] = numbers.laid_out(numbers.rand(*broadcast()) < draw(st.sampled_from([0.0, 0.3, 0.9])))
    if on():
        bias = randn(*broadcast())
        options["bias"] = numbers.laid_out(
            bias.masked_fill(numbers.rand(*bias.shape) < 0.1, -torch.inf) if on() else bias
        )
    if on():
        options["alibi"] = numbers.rand(N)
    if on():
        options["relative_keys"] = randn(2 * draw(st.integers(0, 7)) + 1, D)
    if on() and D % 2 == 0 and options.get("offset", S - L) >= 0:
        angles = 6.28 * numbers.rand(max(S, L + options.get("offset", S - L)), D // 2)
        options["rope"] = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
    if on():
        options |= {"dropout": draw(st.sampled_from([0.1, 0.5, 1.0])), "seed": draw(st.integers(-(2**63), 2**63 - 1))}
    q, k, v = (numbers.laid_out(randn(B, n, length, D)) for n, length in ((N, L), (N_kv, S), (N_kv, S)))
    dtype = draw(DTYPES)
    return [t.to(dtype) for t in (q, k, v)], {
        name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for name, t in options.items()
    }


@pytest.fixture(autouse=True)
def _one_thread_after():
    yield
    torch.set_num_threads(1)


@settings(max_examples=400, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(calls(), st.sampled_from([1, 2, 3]))
def test_agrees_with_the_oracle(call, threads):
    torch.set_num_threads(threads)
    # A gradient may be a sum of much to 0, of a bias constant over the keys for one: the others have the scale then.
    check("attention", *call, together=True)
