"""What `linear_cross_entropy` computes, beyond agreeing with its oracle.

Tested are torch's cross-entropy, normalized distributions, rows without a target, extreme logits,
the kernels' schedules, determinism, and memory that does not grow with rows times classes.
"""

import importlib
import math

import pytest
import torch
from fusedseq import fused
from fusedseq.testing import check, linear_cross_entropy_case, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.support.losses import compare_large_logits, inputs
from tests.support.placement import exact, here

pytestmark = pytest.mark.usefixtures("on_device")

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"weight": torch.linspace(0.0, 2.0, 37, dtype=torch.float64)},
    {"ignore_index": 5},
    {
        "label_smoothing": 0.3,
        "weight": torch.linspace(0.5, 2.0, 37, dtype=torch.float64),
        "ignore_index": 0,
    },
]
REDUCTION = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@REDUCTION
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_equals_torch(ops, options, reduction):
    x, W, target, b = inputs()
    options = here(options, exact())
    target[3] = options.get("ignore_index", -100)
    named = {{"weight": "class_weights"}.get(name, name): value for name, value in options.items()}
    loss = ops.linear_cross_entropy(x, W, target, b, reduction=reduction, **named)
    expected = F.cross_entropy(F.linear(x, W, b), target, reduction=reduction, **options)
    grad_output = torch.randn_like(expected)
    torch.testing.assert_close(loss, expected)
    grads, expected_grads = (
        torch.autograd.grad(y, (x, W, b), grad_output) for y in (loss, expected)
    )
    torch.testing.assert_close(grads, expected_grads)


@REDUCTION
def test_z_loss_and_temperature_by_their_formulas(ops, reduction):
    x, W, target, b = inputs()
    logits = F.linear(x, W, b) / 0.7
    z_loss = 0.01 * logits.logsumexp(-1).square()
    expected = F.cross_entropy(logits, target, reduction="none") + z_loss
    expected = expected if reduction == "none" else getattr(expected, reduction)()
    options = {"temperature": 0.7, "z_loss": 0.01, "reduction": reduction}
    torch.testing.assert_close(ops.linear_cross_entropy(x, W, target, b, **options), expected)


def test_the_scale_of_class_weights_does_not_matter_to_a_mean(ops):
    x, W, target, b = inputs()
    weights = torch.rand(37, dtype=exact())
    losses = [
        ops.linear_cross_entropy(x, W, target, b, class_weights=w, z_loss=0.1)
        for w in (weights, 5 * weights)
    ]
    torch.testing.assert_close(*losses)


def test_details_are_those_of_the_logits(ops):
    x, W, target, b = inputs()
    target[::4] = -100
    logits, has_target = F.linear(x, W, b), target >= 0
    _, log_prob, lse, argmax = ops.linear_cross_entropy(x, W, target, b, return_details=True)
    expected = logits.log_softmax(-1)[has_target].gather(1, target[has_target, None])[:, 0]
    torch.testing.assert_close(log_prob[has_target], expected)
    torch.testing.assert_close(lse[has_target], logits.logsumexp(-1)[has_target])
    assert torch.equal(argmax[has_target], logits.argmax(-1)[has_target])
    assert all((t[~has_target] == 0).all() for t in (log_prob, lse))
    assert (argmax[~has_target] == -1).all()
    assert not argmax.requires_grad


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("best", [[700, 800, 2999], [0, 31, 32], [511, 512], [2047, 2048, 2999]])
def test_the_first_of_equal_logits_is_the_argmax(ops, threads, count, best):
    """Also where the equal logits are in several blocks, or belong to several threads."""
    threads(count)
    W = torch.zeros(3000, 40)
    W[best] = 1.0
    *_, argmax = ops.linear_cross_entropy(
        torch.ones(2, 40), W, torch.tensor([0, 1]), return_details=True
    )
    assert argmax.tolist() == [best[0], best[0]]


def test_all_equal_logits_have_the_first_class_as_argmax_and_their_loss(ops):
    x = torch.ones(3, 4)
    for value in (0.0, -3.0, 1e20):
        W = torch.full((1300, 4), value)
        target = torch.tensor([0, 7, 1299])
        loss, *_, argmax = ops.linear_cross_entropy(x, W, target, return_details=True)
        assert argmax.tolist() == [0, 0, 0]
        torch.testing.assert_close(loss.item(), math.log(1300))


def test_the_loss_of_large_logits_is_as_exact_as_that_of_small_ones(ops):
    compare_large_logits(ops.linear_cross_entropy)


def test_target_probabilities_sum_to_one(ops):
    x, W, _, b = inputs()
    _, log_prob, *_ = ops.linear_cross_entropy(
        x[:1].expand(37, -1), W, torch.arange(37), b, temperature=2.0, return_details=True
    )
    torch.testing.assert_close(log_prob.exp().sum(), torch.tensor(1.0, dtype=exact()))


@REDUCTION
def test_a_row_without_a_target_does_not_matter(ops, reduction):
    """Infinities and NaN in it change neither the loss nor a gradient; its own gradient is zero."""
    x, W, target, b = inputs()
    target[::3] = -100
    changed = x.detach().clone()
    changed[::3] = math.inf
    changed[3] = math.nan
    changed.requires_grad_()
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": reduction}
    results = []
    for rows in (x, changed):
        loss = ops.linear_cross_entropy(rows, W, target, b, **options)
        results.append((loss, *torch.autograd.grad(loss.sum(), (rows, W, b))))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert (results[1][1][::3] == 0).all()


@pytest.mark.parametrize("N", [0, 6])
def test_no_target_at_all(ops, N):
    """The loss and its gradients are 0, where torch's mean is NaN."""
    x, W, target, b = inputs(N)
    loss = ops.linear_cross_entropy(
        x, W, torch.full_like(target, -100), b, label_smoothing=0.1, z_loss=0.1
    )
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, W, b)))
    weightless = ops.linear_cross_entropy(
        x, W, target, b, class_weights=torch.zeros(37, dtype=exact())
    )
    assert weightless == 0


@REDUCTION
def test_the_only_class_has_probability_one(dtype, reduction):
    """The terms of its gradient cancel exactly, whatever the class's weight and the smoothing.

    On a GPU a multiplication and a subtraction may be rounded together, so that they do not.
    """
    x, W, target, b = inputs(50, 3, 1, dtype)
    most = 1e-4 if x.is_cuda else 0
    weight = torch.tensor([0.7], dtype=dtype)
    for options in ({}, {"label_smoothing": 0.3}, {"label_smoothing": 0.2, "temperature": 0.7}):
        for class_weights in (None, weight):
            loss = fused.linear_cross_entropy(
                x, W, target, b, class_weights=class_weights, reduction=reduction, **options
            )
            if not options:
                assert (loss.abs() <= most).all()
            scaled = (0.3 * loss).sum()
            assert all((g.abs() <= most).all() for g in torch.autograd.grad(scaled, (x, W, b)))


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_large_logits(scale):
    """Logits beyond the range of exp do not overflow: the largest has probability one."""
    x = torch.eye(4).requires_grad_()
    W = (scale * torch.eye(4)).requires_grad_()
    for target, expected in ((torch.arange(4), 0.0), ((torch.arange(4) + 1) % 4, scale)):
        loss = fused.linear_cross_entropy(x, W, target)
        torch.testing.assert_close(loss, torch.tensor(expected))
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, W)))


@pytest.mark.parametrize("lowest", [-1e30, -1e37, torch.finfo(torch.float32).min], ids=str)
def test_logits_that_are_all_as_low_as_a_mask_makes_them(ops, lowest):
    """They are equal, so that each of the 37 classes has the same probability."""
    x, W, target, _ = inputs()
    loss = ops.linear_cross_entropy(x, W, target, torch.full((37,), lowest).to(x))
    torch.testing.assert_close(loss, torch.tensor(37.0).to(x).log())


def test_a_class_ruled_out_by_its_bias(ops):
    x, W, _, b = inputs()
    b = b.detach().clone()
    b[4:8] = -math.inf
    target = torch.randint(4, (50,))
    loss = ops.linear_cross_entropy(x, W, target, b)
    rest = [*range(4), *range(8, 37)]
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, W[rest], b[rest]), target))
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, W)))


def test_nan_in_a_row_is_propagated(ops):
    x, W, target, b = inputs()
    x = x.detach().clone()
    x[7, 2] = math.nan
    losses = ops.linear_cross_entropy(x, W, target, b, reduction="none")
    assert losses.isnan().nonzero().tolist() == [[7]]


def test_tied_weights_add_up_in_autograd(ops):
    """A weight of embedding and output layer gets the sum of both gradients, and only from
    autograd.

    Neither operator writes W.grad itself.
    """
    ids, target = torch.randint(37, (2, 50))
    W = torch.randn(37, 7, dtype=exact(), requires_grad=True)
    loss = ops.linear_cross_entropy(ops.embedding(ids, W).tanh(), W, target)
    expected = F.cross_entropy(F.linear(F.embedding(ids, W).tanh(), W), target)
    assert W.grad is None
    torch.testing.assert_close(*(torch.autograd.grad(y, W) for y in (loss, expected)))


@REDUCTION
def test_backward_may_be_called_again(ops, reduction):
    x, W, target, b = inputs()
    loss = ops.linear_cross_entropy(x, W, target, b, reduction=reduction).sum()
    first = [g.clone() for g in torch.autograd.grad(3 * loss, (x, W, b), retain_graph=True)]
    for g in torch.autograd.grad(loss, (x, W, b), retain_graph=True):
        g.zero_()  # the caller may write to the gradients it got
    for again, expected in zip(torch.autograd.grad(loss, (x, W, b)), first, strict=True):
        torch.testing.assert_close(3 * again, expected)


def test_w_gradient_of_bf16_is_summed_in_fp32():
    """Ten thousand rows have the same class; a bf16 sum stops growing at 256 times its terms."""
    N = 10_000
    x = torch.ones(N, 4, dtype=torch.bfloat16)
    W = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    fused.linear_cross_entropy(x, W, torch.zeros(N, dtype=torch.int64), reduction="sum").backward()
    expected = torch.tensor([[-N / 2], [N / 2]], dtype=torch.bfloat16).expand(2, 4)
    torch.testing.assert_close(W.grad, expected)


@pytest.mark.cpu
@pytest.mark.parametrize(("N", "E", "V"), [(700, 20, 3000), (300, 9, 50_000)], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_two_runs_give_the_same_bits(threads, count, N, E, V):
    threads(count)
    x, W, target, b = inputs(N, E, V, torch.float32)
    runs = []
    for _ in range(2):
        loss = fused.linear_cross_entropy(x, W, target, b, label_smoothing=0.1)
        runs.append((loss, *torch.autograd.grad(loss, (x, W, b))))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


# Sizes of csrc/cpu/losses/linear_cross_entropy.h with several chunks of rows, and with groups of
# classes that are wider than a block.
SCHEDULES = pytest.mark.parametrize(("N", "E", "V"), [(5000, 6, 70), (40, 3, 180_000)], ids=str)


@pytest.mark.cpu
@SCHEDULES
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("count", [1, 3])
def test_every_schedule_agrees_with_the_oracle(threads, count, reduction, N, E, V):
    threads(count)
    args, kwargs = linear_cross_entropy_case(
        N, E, V, ignored=7, reduction=reduction, label_smoothing=0.1
    ).inputs()
    check("linear_cross_entropy", args, kwargs)


@pytest.mark.cpu
@pytest.mark.parametrize("N", [300, 800, 2000], ids=["one product", "one chunk", "chunks"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("count", [1, 3])
def test_every_way_to_a_bf16_gradient_of_w(threads, count, reduction, N):
    """The gradient of W is rounded by one product (with AMX for up to 512 rows, else for all rows
    of a chunk), or after the sums over the rows of one or of several chunks.
    """
    threads(count)
    args, kwargs = linear_cross_entropy_case(N, 40, 1100, ignored=7, reduction=reduction).inputs(
        dtype=torch.bfloat16
    )
    check("linear_cross_entropy", args, kwargs)


@pytest.mark.cpu
@pytest.mark.parametrize(("N", "V"), [(400, 42_001), (4100, 7_700)], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32], ids=str)
def test_ranges_of_classes(threads, own, reduction, N, V):
    """More gradients of logits than fit in 32 MiB, so that there are two or more ranges of classes:
    in a backward of its own, and with AMX also in a forward in bf16 that has gradients.
    """
    case = linear_cross_entropy_case(
        N, 6, V, weighted=True, ignored=7, reduction=reduction, label_smoothing=0.1
    )
    args, kwargs = case.inputs(dtype=own)
    check("linear_cross_entropy", args, kwargs)
    results = []
    for count in (1, 3):
        threads(count)
        values, gradients = run(fused.linear_cross_entropy, args, kwargs)
        results.append(values + gradients)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.triton
@pytest.mark.parametrize("block_bytes", [2 << 10, 40 << 10], ids=["classes", "rows"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_schedule_of_the_triton_kernel(monkeypatch, device, dtype, block_bytes, reduction):
    """Blocks of some of the classes, or of some of the rows, for blocks of so few bytes."""
    if dtype == torch.float64:
        pytest.skip("the Triton kernels do not support float64")
    plan = importlib.import_module("fusedseq.kernels.linear_cross_entropy.plan")
    monkeypatch.setattr(plan, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(plan, "FEWEST", 4)
    rows, columns = plan.plan(9, 2500, dtype.itemsize)
    assert (rows < 9) if block_bytes > 5000 else (columns < 2500)
    loss = {"label_smoothing": 0.25, "z_loss": 0.01, "reduction": reduction, "return_details": True}
    case = linear_cross_entropy_case(9, 5, 2500, weighted=True, ignored=4, **loss)
    args, kwargs = case.inputs(device, dtype)
    check("linear_cross_entropy", args, kwargs)


@pytest.mark.triton
def test_lowest_logits_of_the_triton_kernel(device):
    x, W = torch.randn(5, 8, device=device), torch.randn(37, 8, device=device)
    target, b = torch.arange(5, device=device), torch.full((37,), -1e37, device=device)
    loss = fused.linear_cross_entropy(x, W, target, b)
    torch.testing.assert_close(loss, torch.tensor(37.0, device=device).log())


@pytest.mark.triton
def test_blocks_have_about_the_same_size_and_their_rows_are_aligned():
    plan = importlib.import_module("fusedseq.kernels.linear_cross_entropy.plan").plan
    assert plan(4900, 10_000, 2) == (4900, 10_000)  # 98 MB of logits
    assert plan(4900, 50_000, 2) == (1225, 50_000)  # 490 MB, in 4 blocks of rows
    assert plan(2048, 100_000, 2) == (2048, 25_088)  # 410 MB, in 4 blocks of classes
    assert plan(0, 100_000, 2)[0] == 1
    padded = importlib.import_module("fusedseq.kernels.linear_cross_entropy.call").padded
    x = torch.randn(3, 650, dtype=torch.bfloat16)
    assert padded(x).shape == (3, 656)
    assert torch.equal(padded(x)[:, :650], x)
    assert not padded(x)[:, 650:].any()
    x = torch.randn(3, 656, dtype=torch.bfloat16)
    assert padded(x) is x


@pytest.mark.cpu
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_shape_view_and_option(data):
    draw = data.draw
    N, E, V = draw(st.integers(0, 600)), draw(st.integers(1, 40)), draw(st.integers(1, 1500))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def matrix(rows, columns):
        view = draw(st.sampled_from(["dense", "transposed", "strided", "offset"]))
        if view == "transposed":
            return torch.randn(columns, rows, generator=generator).to(dtype).T
        wide = torch.randn(rows + 1, 2 * columns, generator=generator).to(dtype)
        return {
            "dense": wide[1:, :columns].contiguous(),
            "strided": wide[1:, ::2],
            "offset": wide[1:, columns:],
        }[view]

    target = torch.randint(V, (N,), generator=generator)
    if draw(st.booleans()):
        target[:: draw(st.integers(1, 5))] = -100
    weights = (
        {"class_weights": torch.rand(V, generator=generator) + 0.5} if draw(st.booleans()) else {}
    )
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.2])),
        "z_loss": draw(st.sampled_from([0.0, 0.01])),
        "temperature": draw(st.sampled_from([1.0, 0.8])),
        **weights,
    }
    torch.set_num_threads(draw(st.integers(1, 3)))
    try:
        bias = matrix(V, 1)[:, 0] if draw(st.booleans()) else None
        check("linear_cross_entropy", (matrix(N, E), matrix(V, E) / E**0.5, target, bias), options)
    finally:
        torch.set_num_threads(1)


def peak(call):
    """The largest number of bytes in use during a call, above those in use before it."""
    roofline = pytest.importorskip("bench.suite.roofline")
    call()
    peak_bytes = roofline.peak_memory(call, "cpu")
    if peak_bytes is None:
        pytest.skip("this system does not report the memory of a process")
    return peak_bytes


@pytest.mark.cpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_has_no_term_of_rows_times_classes(backward, reduction):
    """Four times the rows need no more than their own inputs, gradients and details.

    Their logits would need 262 and 1049 MB in fp32.
    """
    V, E, peaks = 8000, 16, []
    for N in (8192, 4 * 8192):
        x, W, target, _ = inputs(N, E, V, torch.float32)

        def call(x=x, W=W, target=target):
            with torch.set_grad_enabled(backward):
                loss = fused.linear_cross_entropy(x, W, target, reduction=reduction)
            return torch.autograd.grad(loss.sum(), (x, W)) if backward else loss

        peaks.append(peak(call))
    assert peaks[1] - peaks[0] <= 3 * 8192 * (16 + 3 * E) * 4 + 4_000_000
