"""What the cases of fusedseq.testing do not reach of the attention kernels: the edges of their tiles, options in pairs."""

import itertools

import pytest
import torch
from fusedseq import fused, kernels
from fusedseq.testing import check, run

pytestmark = pytest.mark.triton
B, N = 2, 2
BF16, FP32 = torch.bfloat16, torch.float32
# L, S, D and dtype that each kernel gets.
SIZES = {
    "packed": (5, 6, 10, BF16),
    "row": (20, 33, 20, BF16),
    "tiled": (40, 131, 10, BF16),
    "tiled_fp32": (33, 40, 10, FP32),
}
SPLIT = 3, 600, 10, BF16  # forward alone: the backward of such a call is tiled
OPTIONS = {
    "causal": lambda L, S, D: {"causal": True},
    "lengths": lambda L, S, D: {"key_lengths": torch.tensor([S // 2, S])},
    "mask": lambda L, S, D: {"mask": torch.rand(B, 1, L, S) > 0.3},
    "bias": lambda L, S, D: {"bias": torch.randn(1, N, L, S)},
    "alibi": lambda L, S, D: {"alibi": torch.tensor([0.5, 0.1])},
    "relative": lambda L, S, D: {"relative_keys": torch.randn(2 * 3 + 1, D)},
    "rope": lambda L, S, D: {"rope": torch.randn(S, D)},
    "dropout": lambda L, S, D: {"dropout": 0.3, "seed": 7},
}  # fmt: skip


def inputs(L, S, D, dtype, device, *options, N_kv=N):
    torch.manual_seed(L + S + D)
    tensors = torch.randn(B, N, L, D), torch.randn(B, N_kv, S, D), torch.randn(B, N_kv, S, D)
    kwargs = {k: v for option in options for k, v in OPTIONS[option](L, S, D).items()}
    move = lambda t: t.to(device, dtype if t.is_floating_point() else None) if isinstance(t, torch.Tensor) else t  # noqa: E731
    return tuple(map(move, tensors)), {k: move(v) for k, v in kwargs.items()}


LENGTHS = [
    (1, 1),
    (1, 15),
    (15, 1),
    (16, 16),
    (17, 16),
    (16, 17),
    (1, 128),
    (64, 127),
    (33, 128),
    (65, 129),
    (1, 200),
    (129, 64),
    (1, 17),
]
HEAD_DIMS = [1, 10, 20, 30, 60, 64, 128, 130, 300]


@pytest.mark.parametrize(("L", "S"), LENGTHS)
def test_edges_of_the_tiles_in_length(L, S, device):
    args, kwargs = inputs(L, S, 20, BF16, device, "causal", "lengths", "dropout")
    check("attention", args, kwargs)


# Heads too wide for the row kernel are tiled at its size too, in a tenth of the time.
@pytest.mark.parametrize(("size", "D"), [(s, D) for s in SIZES for D in HEAD_DIMS if D < 128 or s in ("packed", "row")])
def test_edges_of_the_tiles_in_head_dim(size, D, device):
    L, S, _, dtype = SIZES[size]
    args, kwargs = inputs(L, S, D, dtype, device, "bias" if D % 2 else "rope")
    check("attention", args, kwargs)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(OPTIONS, 2)))
@pytest.mark.parametrize("size", SIZES)
def test_options_in_pairs(size, first, second, device):
    args, kwargs = inputs(*SIZES[size], device, first, second)
    check("attention", args, kwargs)


@pytest.mark.parametrize("dims", list(itertools.product((True, False), repeat=4))[1:])
def test_a_bias_of_any_shape(dims, device):
    """Summed over what it is broadcast over, in a fixed order."""
    for L, S, D, _ in (SIZES["packed"], SIZES["tiled_fp32"]):
        args, kwargs = inputs(L, S, D, FP32, device, "lengths")
        bias = torch.randn([n if whole else 1 for n, whole in zip((B, N, L, S), dims, strict=True)], device=device)
        if dims[3]:
            check("attention", args, {**kwargs, "bias": bias})
        else:  # the softmax does not see it
            assert run(fused.attention, args, {**kwargs, "bias": bias})[1][3].abs().max() < 1e-4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("N_kv", [1, 2])
def test_grouped_queries(size, N_kv, device):
    (q, k, v), kwargs = inputs(*SIZES[size], device, "causal", "lengths", "rope", "dropout", N_kv=N_kv)
    check("attention", (torch.cat([q, q.flip(0)], dim=1), k, v), kwargs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("D", [10, 60, 64])
def test_views_of_one_projection(size, D, device):
    """Rows whose addresses are no multiple of 16 bytes, and a last stride that is not 1."""
    L, S, _, dtype = SIZES[size]
    projected = torch.randn(B, S, 3 * N * D + 1, device=device).to(dtype)[..., 1:]
    q, k, v = (t.unflatten(-1, (N, D)).transpose(1, 2) for t in projected.chunk(3, dim=-1))
    check("attention", (q[:, :, :L], k, v), {"causal": True})
    q, k, v = (t.mT.contiguous().mT for t in (q, k, v))
    check("attention", (q[:, :, :L], k, v), {"causal": True})


@pytest.mark.parametrize("options", [*([o] for o in OPTIONS), ["causal", "lengths", "alibi", "dropout"]], ids=str)
def test_keys_in_parts(options, device):
    args, kwargs = inputs(*SPLIT, device, *options)
    with torch.no_grad():
        check("attention", args, kwargs, backward=False)


@pytest.mark.parametrize("size", [(1, 512, 64, BF16), (4, 1100, 20, FP32), (2, 530, 300, BF16)])
def test_edges_of_the_parts(size, device):
    args, kwargs = inputs(*size, device, "lengths")
    kwargs["key_lengths"][0] = 3  # all parts but the first are empty
    with torch.no_grad():
        check("attention", args, kwargs, backward=False)


def test_gradients_of_keys_in_parts(device):
    """Backward reads the log-sum-exp that the parts make together, of a query that sees nothing too."""
    args, kwargs = inputs(*SPLIT, device, "dropout")
    check("attention", args, {**kwargs, "key_lengths": torch.tensor([400, 0], device=device)})


@pytest.mark.parametrize("size", [*SIZES.values(), SPLIT], ids=[*SIZES, "split"])
@pytest.mark.parametrize("options", [[], ["rope"], ["rope", "relative"], ["lengths", "dropout", "alibi"]], ids=str)
def test_keys_by_a_table_of_rows(size, options, device):
    (q, k, v), kwargs = inputs(*size, device, *options)
    S = k.size(2)
    rows = torch.arange(B * S, device=device).square().reshape(B, S) % 3
    k, v = (torch.cat([t, t.flip(0)])[:3] for t in (k, v))
    with torch.no_grad():
        check("attention", (q, k, v), {**kwargs, "key_rows": rows}, backward=False)


@pytest.mark.parametrize("size", SIZES)
def test_queries_that_see_nothing(size, device):
    args, kwargs = inputs(*SIZES[size], device, "bias", "dropout")
    seen = torch.rand(B, N, *kwargs["bias"].shape[2:], device=device) > 0.5
    seen[0, 1, 2], seen[1] = False, False
    kwargs["mask"], kwargs["key_lengths"] = seen, torch.tensor([4, 0], device=device)
    check("attention", args, kwargs)
    results, grads = run(fused.attention, args, kwargs)
    assert not results[0][1].any()
    assert not any(grad[1].any() for grad in grads[:3])


@pytest.mark.parametrize("size", SIZES)
def test_nothing_behind_the_lengths_is_looked_at(size, device):
    args, kwargs = inputs(*SIZES[size], device, "lengths", "causal")
    (y, *_), wanted = run(fused.attention, args, kwargs)
    for t in args[1:]:
        t[0, :, SIZES[size][1] // 2 :] = float("nan")
    (z, *_), grads = run(fused.attention, args, kwargs)
    assert torch.equal(y, z)
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_dropout_of_everything(size, device):
    args, kwargs = inputs(*SIZES[size], device)
    results, grads = run(fused.attention, args, {"dropout": 1.0})
    assert not any(t.any() for t in results + grads)


@pytest.mark.parametrize("size", SIZES)
def test_some_gradients(size, device):
    args, kwargs = inputs(*SIZES[size], device, "bias", "relative")
    for needs in ([0], [1], [2], [3], [4], [0, 4]):
        check("attention", args, kwargs, needs=needs)


@pytest.mark.parametrize("size", SIZES)
def test_an_empty_batch(size, device):
    args, _ = inputs(*SIZES[size], device)
    results, grads = run(fused.attention, tuple(t[:0] for t in args), {"dropout": 0.5})
    assert [t.shape for t in results + grads] == [t[:0].shape for t in (args[0], *args)]


def test_tf32_is_asked_for_where_torch_allows_it(device):
    attention = kernels.module("attention")
    call = attention.prepare(*(torch.randn(1, 1, 4, 4) for _ in range(3)), *[None] * 7, None, 1.0, False, 0, 0.0)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for setting, wanted in (("ieee", "ieee"), ("tf32", "tf32")):
            torch.backends.cuda.matmul.fp32_precision = setting
            assert call.constants({})["PRECISION"] == wanted
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("options", [(), ("relative", "dropout"), ("relative", "rope")], ids="-".join)
@pytest.mark.parametrize(("L", "D", "type"), [(5, 10, BF16), (20, 20, BF16), (131, 10, BF16), (33, 10, FP32)])
def test_gradients_lie_as_the_projections(L, D, type, options, parts, device):
    """The gradients of the parts of a projection are its gradient where they lie, and the numbers that they are apart."""
    (q, *_), kwargs = inputs(L, L, D, type, device, *options)
    y = torch.randn(B, L, parts, N, D).to(device, type)

    def gradients(*views):
        views = [t.detach().requires_grad_() for t in views]
        out = fused.attention(*[q] * (3 - parts), *views, **kwargs)
        return torch.autograd.grad(out.float().square().sum(), views)

    views = y.permute(2, 0, 3, 1, 4).unbind(0)
    found, wanted = gradients(*views), gradients(*(t.clone() for t in views))
    for got, apart in zip(found, wanted, strict=True):
        assert torch.equal(got, apart)
    if options != ("relative", "rope"):  # which are rotated back, into memory of their own
        together = found[0].as_strided(y.shape, y.stride()).permute(2, 0, 3, 1, 4)
        assert all(torch.equal(got, whole) for got, whole in zip(found, together.unbind(0), strict=True))
