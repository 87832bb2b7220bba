"""What the cases of fusedseq.testing do not cover of the attention kernels: edges of tiles, and
pairs of options."""

import importlib
import itertools

import pytest
import torch
from fusedseq import fused, kernels, reference
from fusedseq.testing import check, run

pytestmark = [pytest.mark.triton, pytest.mark.sampled(3)]
B, N = 2, 2
BF16, FP32 = torch.bfloat16, torch.float32
# (L, S, D, dtype) of a call that runs each kernel.
SIZES = {
    "packed": (5, 6, 10, BF16),
    "row": (20, 33, 20, BF16),
    "tiled": (40, 131, 10, BF16),
    "tiled_fp32": (33, 40, 10, FP32),
}
SPLIT = 3, 600, 10, BF16  # forward only: the backward of such a call is tiled
OPTIONS = {
    "causal": lambda L, S, D: {"causal": True},
    "lengths": lambda L, S, D: {"key_lengths": torch.tensor([S // 2, S])},
    "mask": lambda L, S, D: {"mask": torch.rand(B, 1, L, S) > 0.3},
    "bias": lambda L, S, D: {"bias": torch.randn(1, N, L, S)},
    "alibi": lambda L, S, D: {"alibi": torch.tensor([0.5, 0.1])},
    "relative": lambda L, S, D: {"relative_keys": torch.randn(2 * 3 + 1, D)},
    "rope": lambda L, S, D: {"rope": torch.randn(S, D)},
    "dropout": lambda L, S, D: {"dropout": 0.3, "seed": 7},
}
# Those that the tiled kernels alone compute, at any size.
OF_TILED = {
    "window": lambda L, S, D: {"window": (20, 9)},
    "softcap": lambda L, S, D: {"softcap": 2.0},
    "sinks": lambda L, S, D: {"sinks": torch.tensor([0.7, -0.4])},
}


def inputs(L, S, D, dtype, device, *options, N_kv=N):
    torch.manual_seed(L + S + D)
    tensors = torch.randn(B, N, L, D), torch.randn(B, N_kv, S, D), torch.randn(B, N_kv, S, D)
    known = OPTIONS | OF_TILED
    kwargs = {k: v for option in options for k, v in known[option](L, S, D).items()}

    def move(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(device, dtype if x.is_floating_point() else None)

    return tuple(map(move, tensors)), {k: move(v) for k, v in kwargs.items()}


LENGTHS = [
    *((1, 1), (1, 15), (15, 1), (16, 16), (17, 16), (16, 17), (1, 17)),
    *((1, 128), (64, 127), (33, 128), (65, 129), (1, 200), (129, 64)),
]
HEAD_DIMS = [1, 10, 20, 30, 60, 64, 128, 130, 300]


@pytest.mark.parametrize(("L", "S"), LENGTHS)
def test_lengths_at_the_edges_of_tiles(L, S, device):
    args, kwargs = inputs(L, S, 20, BF16, device, "causal", "lengths", "dropout")
    check("attention", args, kwargs)


@pytest.mark.parametrize(
    "options", [["causal"], ["dropout", "lengths"], ["bias"], ["mask", "causal", "alibi"]], ids=str
)
@pytest.mark.parametrize("D", [64, 128])
def test_tiles_of_compute_capability_90(monkeypatch, D, options, device):
    from fusedseq.kernels import launch

    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the tiles need the shared memory of compute capability 9.0")
    plan = importlib.import_module("fusedseq.kernels.attention.plan")
    monkeypatch.setattr(launch, "capability", lambda kernel, x: 90)
    chosen, sizes_of_tiles = [], plan.sizes_of_tiles

    def recorded(*args):
        chosen.append(args)
        return sizes_of_tiles(*args)

    monkeypatch.setattr(plan, "sizes_of_tiles", recorded)
    args, kwargs = inputs(70, 150, D, BF16, device, *options, N_kv=1)
    check("attention", args, kwargs)
    bias = "bias" in options or "mask" in options
    pressure = plan.BIAS if bias else plan.DROPOUT if "dropout" in options else plan.PLAIN
    assert set(chosen) == {(D, pressure, True)}


def test_compute_capability_90_alone_has_tiles_of_its_own():
    plan = importlib.import_module("fusedseq.kernels.attention.plan")
    for (width, pressure), sizes in plan.TILED_HOPPER.items():
        usual = plan.TILED[width, min(pressure, plan.RICH)]
        assert sizes != usual
        own, other = (
            plan.plan(512, 512, width, 2, pressure, hopper=hopper) for hopper in (True, False)
        )
        assert (own.forward, own.backward, own.queries) == tuple(
            plan.tiles(*size, width) for size in sizes
        )
        assert (other.forward, other.backward, other.queries) == tuple(
            plan.tiles(*size, width) for size in usual
        )
    short = [plan.plan(90, 90, 64, 2, pressure) for pressure in (plan.RICH, plan.BIAS)]
    assert short[0] == short[1]  # BIAS is RICH in the other kernels


@pytest.mark.parametrize("loads", [1, 2])
@pytest.mark.parametrize(
    ("L", "S", "D", "N_kv", "options"),
    [
        (70, 200, 64, 1, []),
        (200, 200, 64, 2, ["causal", "dropout"]),
        (40, 150, 80, 2, ["bias"]),
        (33, 150, 200, 2, ["causal", "alibi"]),
        (70, 200, 64, 1, ["causal", "window"]),
        (70, 200, 64, 2, ["window", "softcap", "sinks"]),
        (40, 131, 10, 2, []),  # rows of 20 bytes have no descriptor
        (70, 200, 64, 2, ["lengths"]),  # nor have keys past a length
    ],
)
def test_keys_loaded_by_descriptors_give_the_same_bits(
    monkeypatch, L, S, D, N_kv, options, loads, device
):
    from fusedseq.kernels import attention

    made = []

    class Descriptor(attention.TensorDescriptor):
        def __init__(self, *args):
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(attention, "TensorDescriptor", Descriptor)
    args, kwargs = inputs(L, S, D, BF16, device, *options, N_kv=N_kv)
    width = next(w for w in (64, 128, 256) if w >= D)
    found = []
    for number in (0, loads):
        for pressure in range(3):
            tiles = 64, 32, 64, 8, 2, number
            monkeypatch.setitem(kernels.tiles, (width, pressure, "forward"), tiles)
        found.append(fused.attention(*args, **kwargs))
    assert torch.equal(*found)
    assert bool(made) == (D != 10 and "lengths" not in options)


# Heads too wide for the row kernel run the tiled kernels at its size, a tenth of the time of a
# tiled size.
@pytest.mark.parametrize(
    ("size", "D"), [(s, D) for s in SIZES for D in HEAD_DIMS if D < 128 or s in ("packed", "row")]
)
def test_head_dimensions_at_the_edges_of_tiles(size, D, device):
    L, S, _, dtype = SIZES[size]
    args, kwargs = inputs(L, S, D, dtype, device, "bias" if D % 2 else "rope")
    check("attention", args, kwargs)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(OPTIONS, 2)))
@pytest.mark.parametrize("size", SIZES)
def test_pairs_of_options(size, first, second, device):
    args, kwargs = inputs(*SIZES[size], device, first, second)
    check("attention", args, kwargs)


@pytest.mark.parametrize("first", OF_TILED)
@pytest.mark.parametrize("second", [*OPTIONS, *OF_TILED])
def test_options_of_the_tiled_kernels_beside_another(first, second, device):
    args, kwargs = inputs(*SIZES["tiled_fp32"], device, first, second)
    check("attention", args, kwargs)


@pytest.mark.parametrize("size", ["packed", "row", "tiled"])
def test_options_of_the_tiled_kernels_in_16_bits(size, device):
    args, kwargs = inputs(*SIZES[size], device, "causal", "dropout", *OF_TILED)
    check("attention", args, kwargs)


def test_options_of_the_tiled_kernels_in_decoding(device):
    """Rows of a cache, which without these options the kernel for keys in parts reads."""
    (q, k, v), kwargs = inputs(1, 600, 16, BF16, device, *OF_TILED)
    rows = torch.randint(B, (B, 600), device=device)
    check("attention", (q, k, v), {**kwargs, "key_rows": rows}, backward=False)


@pytest.mark.parametrize("offset", [2**30 + 100, 2**31 - 1000, 2**31, 2**40, -(2**30) - 100])
@pytest.mark.parametrize("window", [(None, 0), (0, None), (2**31, 5), (5, 2**31)], ids=str)
def test_a_window_far_from_position_0(offset, window, device):
    """Sides of a window are no smaller than positions there."""
    args, _ = inputs(*SIZES["tiled_fp32"], device)
    check("attention", args, {"offset": offset, "window": window})


def test_a_sequence_longer_than_max_seqlen_is_kept_within_the_results(device):
    """The lengths of sequences on a GPU are not read by the checks. What the kernel has no rows
    for is left out."""
    attention = kernels.module("attention")
    call = importlib.import_module("fusedseq.kernels.attention.call")
    q, k, v = (torch.randn(1, N, 100, 16, device=device) for _ in range(3))
    ends = torch.tensor([0, 100], device=device)
    extra = call.Extra(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=64, max_seqlen_k=64)
    prepared = attention.prepare(
        *(q, k, v), *[None] * 6, True, None, None, 0.25, False, 0, 0.0, extra
    )
    out = attention.heads_last(q, *q.shape).zero_()
    rows = torch.zeros(4, N, 64, device=device)  # the results' rows, and what follows them
    attention.forward(prepared, out, rows[:1], None)
    first = (t[:, :, :64] for t in (q, k, v))
    torch.testing.assert_close(out[:, :, :64], reference.attention(*first, scale=0.25))
    assert not out[:, :, 64:].any()
    assert rows[0].all()
    assert not rows[1:].any()


def test_packed_sequences_with_relative_keys_and_rope_are_refused(device):
    x = torch.randn(7, N, 8, device=device)
    ends = torch.tensor([0, 3, 7], device=device)
    options = {
        "relative_keys": torch.randn(5, 8, device=device),
        "rope": torch.randn(7, 8, device=device),
    }
    with pytest.raises(NotImplementedError, match="relative_keys and rope are not computed"):
        fused.attention_varlen(x, x, x, ends, ends, **options)


@pytest.mark.parametrize("dims", list(itertools.product((True, False), repeat=4))[1:])
def test_bias_broadcast_over_any_dimensions(dims, device):
    """Its gradient is summed over these dimensions.    dims: whether each of B, N, L, S is not
    broadcast"""
    for L, S, D, _ in (SIZES["packed"], SIZES["tiled_fp32"]):
        args, kwargs = inputs(L, S, D, FP32, device, "lengths")
        bias = torch.randn(
            [n if whole else 1 for n, whole in zip((B, N, L, S), dims, strict=True)], device=device
        )
        if dims[3]:
            check("attention", args, {**kwargs, "bias": bias})
        else:  # the same number for all keys does not change their softmax
            assert run(fused.attention, args, {**kwargs, "bias": bias})[1][3].abs().max() < 1e-4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("N_kv", [1, 2])
def test_grouped_queries(size, N_kv, device):
    (q, k, v), kwargs = inputs(
        *SIZES[size], device, "causal", "lengths", "rope", "dropout", N_kv=N_kv
    )
    check("attention", (torch.cat([q, q.flip(0)], dim=1), k, v), kwargs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("D", [10, 60, 64])
def test_views_of_one_projection(size, D, device):
    """Rows whose addresses are not multiples of 16 bytes, then tensors whose last stride is not
    1."""
    L, S, _, dtype = SIZES[size]
    projected = torch.randn(B, S, 3 * N * D + 1, device=device).to(dtype)[..., 1:]
    q, k, v = (t.unflatten(-1, (N, D)).transpose(1, 2) for t in projected.chunk(3, dim=-1))
    check("attention", (q[:, :, :L], k, v), {"causal": True})
    q, k, v = (t.mT.contiguous().mT for t in (q, k, v))
    check("attention", (q[:, :, :L], k, v), {"causal": True})


@pytest.mark.parametrize(
    "options", [*([o] for o in OPTIONS), ["causal", "lengths", "alibi", "dropout"]], ids=str
)
def test_split_keys(options, device):
    args, kwargs = inputs(*SPLIT, device, *options)
    with torch.no_grad():
        check("attention", args, kwargs, backward=False)


@pytest.mark.parametrize("size", [(1, 512, 64, BF16), (4, 1100, 20, FP32), (2, 530, 300, BF16)])
def test_split_keys_of_which_parts_are_empty(size, device):
    args, kwargs = inputs(*size, device, "lengths")
    kwargs["key_lengths"][0] = 3  # all parts except the first are empty
    with torch.no_grad():
        check("attention", args, kwargs, backward=False)


def test_gradients_of_split_keys(device):
    """Backward reads the log-sum-exp that split_combine computes, also that of a query that sees no
    key."""
    args, kwargs = inputs(*SPLIT, device, "dropout")
    check("attention", args, {**kwargs, "key_lengths": torch.tensor([400, 0], device=device)})


@pytest.mark.parametrize("size", [*SIZES.values(), SPLIT], ids=[*SIZES, "split"])
@pytest.mark.parametrize(
    "options", [[], ["rope"], ["rope", "relative"], ["lengths", "dropout", "alibi"]], ids=str
)
def test_key_rows(size, options, device):
    (q, k, v), kwargs = inputs(*size, device, *options)
    S = k.size(2)
    key_rows = torch.arange(B * S, device=device).square().reshape(B, S) % 3
    k, v = (torch.cat([t, t.flip(0)])[:3] for t in (k, v))
    with torch.no_grad():
        check("attention", (q, k, v), {**kwargs, "key_rows": key_rows}, backward=False)


@pytest.mark.parametrize("size", SIZES)
def test_queries_that_see_no_key(size, device):
    args, kwargs = inputs(*SIZES[size], device, "bias", "dropout")
    mask = torch.rand(B, N, *kwargs["bias"].shape[2:], device=device) > 0.5
    mask[0, 1, 2], mask[1] = False, False
    kwargs["mask"], kwargs["key_lengths"] = mask, torch.tensor([4, 0], device=device)
    check("attention", args, kwargs)
    results, grads = run(fused.attention, args, kwargs)
    assert not results[0][1].any()
    assert not any(grad[1].any() for grad in grads[:3])


@pytest.mark.parametrize("size", SIZES)
def test_keys_past_the_lengths_are_never_read(size, device):
    args, kwargs = inputs(*SIZES[size], device, "lengths", "causal")
    (y, *_), expected = run(fused.attention, args, kwargs)
    for t in args[1:]:
        t[0, :, SIZES[size][1] // 2 :] = float("nan")
    (z, *_), grads = run(fused.attention, args, kwargs)
    assert torch.equal(y, z)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


ROPES = {  # columns that are rotated, of D; whether pairs are neighbours
    "halves": lambda D: (D - D % 2, False),
    "some halves": lambda D: (D // 4 * 2, False),
    "some": lambda D: (D // 4 * 2, True),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("D", [10, 33, 64, 130])
@pytest.mark.parametrize("size", SIZES)
def test_rope_of_either_convention_and_of_some_columns(size, D, rope, device):
    L, S, _, dtype = SIZES[size]
    R, interleaved = ROPES[rope](D)
    args, kwargs = inputs(L, S, D, dtype, device, "causal")
    table = torch.randn(S, R, device=device).to(dtype)
    check("attention", args, {**kwargs, "rope": table, "rope_interleaved": interleaved})


@pytest.mark.parametrize("rope", ROPES)
def test_rope_of_split_keys_and_with_relative_keys(rope, device):
    R, interleaved = ROPES[rope](SPLIT[2])
    table = torch.randn(SPLIT[1], R, device=device).to(SPLIT[3])
    options = {"rope": table, "rope_interleaved": interleaved}
    args, kwargs = inputs(*SPLIT, device)
    with torch.no_grad():
        check("attention", args, {**kwargs, **options}, backward=False)
    args, kwargs = inputs(*SIZES["packed"], device, "relative")
    check("attention", args, {**kwargs, **options})


SATURATED = {
    **SIZES,
    "packed_fp32": (5, 6, 10, FP32),
    "tiled_fp32_of_many_keys": (20, 131, 16, FP32),
}


@pytest.mark.parametrize("option", [None, *OPTIONS])
@pytest.mark.parametrize("size", SATURATED)
def test_gradients_of_a_saturated_softmax(size, option, device):
    """Logits of some hundreds, of which a row's largest has nearly all the probability.

    The numbers are multiples of 1/4 and the rope turns by right angles, so that the logits are
    exact in any order of summation.
    """
    (q, k, v), kwargs = inputs(*SATURATED[size], device, *[option] * (option is not None))
    q, k, v = (t.mul(4).round() / 4 for t in (q, k, v))
    for name in kwargs.keys() & {"bias", "alibi", "relative_keys"}:
        kwargs[name] = kwargs[name].mul(4).round() / 4
    if option == "rope":
        turns = torch.eye(2).to(q)[torch.randint(2, (kwargs["rope"].size(0), k.size(3) // 2))]
        kwargs["rope"] = turns.flatten(1)
    check("attention", (16 * q, k, v), {"scale": 1.0, **kwargs})


ONE_KEY = {  # options under which every query sees the first key alone
    "lengths": lambda S: {"key_lengths": torch.tensor([1, 1])},
    "mask": lambda S: {"mask": torch.arange(S) == 0},
    "bias": lambda S: {"bias": torch.zeros(1, S).masked_fill(torch.arange(S) > 0, -torch.inf)},
}


@pytest.mark.parametrize("more", [(), ("dropout",), ("relative",)], ids="-".join)
@pytest.mark.parametrize("option", ONE_KEY)
@pytest.mark.parametrize("size", SIZES)
def test_one_visible_key_has_no_gradient_of_queries_and_keys(size, option, more, device):
    L, S, D, dtype = SIZES[size]
    (q, k, v), kwargs = inputs(L, S, D, dtype, device, *more)
    options = {n: t.to(device) for n, t in ONE_KEY[option](S).items()}
    if "bias" in options:
        options["bias"] = options["bias"].to(dtype)
    _, (dq, dk, dv, *others) = run(fused.attention, (30 * q, k, v), {**options, **kwargs})
    assert not any(t.any() for t in (dq, dk, *others))
    assert dv[:, :, 0].any()


@pytest.mark.parametrize("size", SIZES)
def test_the_first_query_of_causal_attention_has_no_gradient(size, device):
    L, _, D, dtype = SIZES[size]
    (q, k, v), _ = inputs(L, L, D, dtype, device)
    _, (dq, *_) = run(fused.attention, (30 * q, k, v), {"causal": True})
    assert not dq[:, :, 0].any()
    assert dq[:, :, 1].any()


@pytest.mark.parametrize("sizes", [(2, 0, 3, 4, 5), (2, 2, 0, 4, 5), (2, 2, 3, 0, 5)], ids=str)
def test_sizes_of_0(sizes, device):
    """The result is zeros where there is no key, and all gradients are zeros."""
    B, N, L, S, D = sizes
    q, k, v = (torch.randn(B, N, n, D, device=device) for n in (L, S, S))
    (y, *_), grads = run(fused.attention, (q, k, v), {"bias": torch.randn(L, S, device=device)})
    assert [t.shape for t in (y, *grads)] == [t.shape for t in (q, q, k, v, grads[3])]
    assert grads[3].shape == (L, S)
    assert not any(t.any() for t in (y, *grads))


@pytest.mark.parametrize("size", SIZES)
def test_dropout_of_1(size, device):
    args, kwargs = inputs(*SIZES[size], device)
    results, grads = run(fused.attention, args, {"dropout": 1.0})
    assert not any(t.any() for t in results + grads)


@pytest.mark.parametrize("size", SIZES)
def test_subsets_of_the_gradients(size, device):
    args, kwargs = inputs(*SIZES[size], device, "bias", "relative")
    for needs in ([0], [1], [2], [3], [4], [0, 4]):
        check("attention", args, kwargs, needs=needs)


@pytest.mark.parametrize("size", SIZES)
def test_empty_batch(size, device):
    args, _ = inputs(*SIZES[size], device)
    results, grads = run(fused.attention, tuple(t[:0] for t in args), {"dropout": 0.5})
    assert [t.shape for t in results + grads] == [t[:0].shape for t in (args[0], *args)]


def test_tf32_follows_torchs_setting(device):
    attention = kernels.module("attention")
    call = attention.prepare(
        *(torch.randn(1, 1, 4, 4) for _ in range(3)),
        *[None] * 6,
        True,
        None,
        None,
        1.0,
        False,
        0,
        0.0,
    )
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for setting in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = setting
            assert call.constants({})["PRECISION"] == setting
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    "options", [(), ("relative", "dropout"), ("relative", "rope")], ids="-".join
)
@pytest.mark.parametrize(
    ("L", "D", "type"), [(5, 10, BF16), (20, 20, BF16), (131, 10, BF16), (33, 10, FP32)]
)
def test_gradients_are_stored_as_parts_of_the_projections(L, D, type, options, parts, device):
    """Gradients of views of one projection are views of one tensor, and equal those of separate
    tensors."""
    (q, *_), kwargs = inputs(L, L, D, type, device, *options)
    projection = torch.randn(B, L, parts, N, D).to(device, type)

    def gradients(*views):
        views = [t.detach().requires_grad_() for t in views]
        out = fused.attention(*[q] * (3 - parts), *views, **kwargs)
        return torch.autograd.grad(out.float().square().sum(), views)

    views = projection.permute(2, 0, 3, 1, 4).unbind(0)
    of_views, of_copies = gradients(*views), gradients(*(t.clone() for t in views))
    for got, expected in zip(of_views, of_copies, strict=True):
        assert torch.equal(got, expected)
    if options != ("relative", "rope"):  # these are rotated back, into memory of their own
        first = of_views[0]
        together = first.as_strided(projection.shape, projection.stride()).permute(2, 0, 3, 1, 4)
        for got, part in zip(of_views, together.unbind(0), strict=True):
            assert torch.equal(got, part)
