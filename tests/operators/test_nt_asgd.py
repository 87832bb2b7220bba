"""The optimizer NTASGD, whose step is one fused operator.

It is compared with torch.optim.ASGD, torch.optim.SGD and clip_grad_norm_. Further: the non-monotone
trigger as published, a checkpoint that continues bit for bit, any layout of parameters and
gradients, and wrong settings.
"""

import copy
import math

import pytest
import torch
from fusedseq.optim import NTASGD, non_monotone
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

SHAPES = [(), (1,), (17,), (5, 3), (0,), (3, 0), (130, 257), (20_011,), (2, 3, 5)]
OWN = [torch.float32, torch.float64, torch.bfloat16]
DTYPES = pytest.mark.parametrize("own", OWN, ids=str)


def parameters(device="cpu", dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(5)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes
    ]


def twins(device="cpu", dtype=torch.float32, shapes=SHAPES):
    """Two equal lists of parameters."""
    return parameters(device, dtype, shapes), parameters(device, dtype, shapes)


def draw_gradients(step, *lists, scale=1.0):
    """Sets gradients: the same for each list of parameters, different ones at each step."""
    generator = torch.Generator().manual_seed(step)
    for together in zip(*lists, strict=True):
        g = scale * torch.randn(together[0].shape, generator=generator)
        for p in together:
            p.grad = g.to(p.device, p.dtype, copy=True)


@DTYPES
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_asgd(own, weight_decay, device):
    """Parameters and averages agree over steps with a varying learning rate.

    torch stores the average of bf16 parameters in bf16, so there only the parameters are compared
    with torch; all averages are compared with the mean itself.
    """
    ours, theirs = twins(device, own)
    optimizer = NTASGD(ours, 0.1, weight_decay=weight_decay)
    optimizer.start_averaging()
    other = torch.optim.ASGD(theirs, 0.1, lambd=0.0, t0=0, weight_decay=weight_decay)
    history = []
    for step in range(40):
        for o in (optimizer, other):
            o.param_groups[0]["lr"] = 0.1 * (1 + step % 3)
        draw_gradients(step, ours, theirs)
        optimizer.step()
        other.step()
        history.append([p.detach().clone() for p in ours])
    unit = max(torch.finfo(own).eps, torch.finfo(torch.float32).eps)  # torch's eta is fp32
    # A random walk of three roundings a step: our parameter, torch's gradient and parameter.
    relative_error = unit * (3 * len(history)) ** 0.5
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        values = torch.stack([step_parameters[i] for step_parameters in history]).double()
        allowed = relative_error * values.abs().amax(0)
        assert ((p.double() - q.double()).abs() <= allowed).all()
        average, mean = optimizer.state[p]["average"], values[1:].mean(0)
        rounding = len(history) * torch.finfo(average.dtype).eps  # one a step
        torch.testing.assert_close(average.double(), mean, atol=rounding, rtol=rounding)
        if own != torch.bfloat16:
            torch_average = other.state[q]["ax"].double()
            assert ((average.double() - torch_average).abs() <= allowed).all()


@DTYPES
@pytest.mark.parametrize("max_norm", [0.0, 0.25, 1e4, math.inf])
def test_clips_as_clip_grad_norm(own, max_norm, device):
    ours, theirs = twins(device, own)
    optimizer, other = NTASGD(ours, 0.5, max_norm=max_norm), torch.optim.SGD(theirs, 0.5)
    for step in range(5):
        draw_gradients(step, ours, theirs)
        before = [p.grad.clone() for p in ours]
        norm = nn.utils.clip_grad_norm_(theirs, max_norm)
        optimizer.step()
        other.step()
        unchanged = all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True))
        assert unchanged, "step() changed the gradients"
        exact = torch.cat([g.double().flatten() for g in before]).norm()
        # Both sums are in fp64; ours is then rounded to the norm's dtype.
        terms = sum(g.numel() for g in before)
        eps = torch.finfo(optimizer.grad_norm.dtype).eps
        rounding = 2 * (eps + torch.finfo(torch.float64).eps * terms**0.5)
        torch.testing.assert_close(optimizer.grad_norm.double(), exact, rtol=rounding, atol=0)
        torch.testing.assert_close(optimizer.grad_norm.to(norm.dtype), norm)
        torch.testing.assert_close(ours, theirs)


def test_a_gradient_that_is_not_finite_shows_in_the_norm(device):
    for bad in (math.nan, math.inf):
        (p,) = parameters(device, shapes=[(33,)])
        p.grad = torch.ones_like(p)
        p.grad[32] = bad
        optimizer = NTASGD([p], 1.0, max_norm=1.0)
        optimizer.step()
        torch.testing.assert_close(optimizer.grad_norm.item(), bad, equal_nan=True)
        assert not p[32].isfinite()


def test_triggered_as_published():
    """Merity et al., 2018: len(log) > n and loss > min(log[:-n]), with the log before this loss."""
    losses = [9, 8, 7, 6, 5, 6.7, 6.6, 6.95, 6.5, 6.85, 6.1]
    assert [i for i in range(len(losses)) if non_monotone(losses[:i], losses[i])] == [9, 10]
    optimizer = NTASGD(parameters(), 0.1)
    assert [optimizer.observe(loss) for loss in losses] == [False] * 9 + [True] * 2
    assert not non_monotone([3, 2, 1, 1, 1], 9, 5)
    assert non_monotone([3, 2, 1, 1, 1], 9, 4)


def test_sgd_until_the_trigger(device):
    ours, theirs = twins(device)
    optimizer, other = (
        NTASGD(ours, 0.3, weight_decay=0.01),
        torch.optim.SGD(theirs, 0.3, weight_decay=0.01),
    )
    for step in range(5):
        draw_gradients(step, ours, theirs)
        optimizer.step()
        other.step()
    torch.testing.assert_close(ours, theirs)
    assert optimizer.averages() == []
    with optimizer.averaged():
        torch.testing.assert_close(ours, theirs)


def test_averaged_is_exact_and_reversible(device):
    ps = parameters(device, torch.bfloat16)
    optimizer = NTASGD(ps, 0.3)
    optimizer.start_averaging()
    for step in range(7):
        draw_gradients(step, ps)
        optimizer.step()
    raw = [p.detach().clone() for p in ps]
    with optimizer.averaged():
        assert all(torch.equal(p, optimizer.state[p]["average"].bfloat16()) for p in ps)
    assert all(torch.equal(p, r) for p, r in zip(ps, raw, strict=True))


def test_averaged_restores_the_parameters_after_an_error(device):
    ps = parameters(device)
    optimizer = NTASGD(ps, 0.3)
    optimizer.start_averaging()
    for step in range(3):
        draw_gradients(step, ps)
        optimizer.step()
    raw = [p.detach().clone() for p in ps]
    with pytest.raises(KeyboardInterrupt), optimizer.averaged():
        raise KeyboardInterrupt
    assert all(torch.equal(p, r) for p, r in zip(ps, raw, strict=True))


@DTYPES
@pytest.mark.parametrize("how", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("stop", [4, 11])  # before and after the trigger
def test_resumed_equals_uninterrupted(own, how, stop, device, tmp_path):
    """Bit for bit, over the trigger and with a learning rate that changes every step."""
    whole = parameters(device, own)
    optimizer = NTASGD(whole, 0.3, weight_decay=0.1, max_norm=3.0, n=1)
    for step in range(stop):
        advance(step, whole, optimizer)
    assert optimizer.averaging == (stop > 4)
    if how == "deepcopy":
        resumed, second = copy.deepcopy((whole, optimizer))
    else:
        torch.save((optimizer.state_dict(), [p.data for p in whole]), tmp_path / "state")
        state, values = torch.load(tmp_path / "state", weights_only=True)
        resumed = [nn.Parameter(value) for value in values]
        second = NTASGD(resumed, 99.0, max_norm=3.0, n=1)
        second.load_state_dict(state)
    for step in range(stop, stop + 9):
        advance(step, whole, optimizer)
        advance(step, resumed, second)
    assert optimizer.averaging
    assert second.averaging
    assert second.losses == optimizer.losses
    for p, q in zip(whole, resumed, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["average"], second.state[q]["average"])


def advance(step, ps, optimizer):
    draw_gradients(step, ps)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + step % 4)
    optimizer.step()
    optimizer.observe([5, 4, 3, 4, 5, 6][step % 6])


def test_any_number_of_threads_gives_the_same_bits(threads, device):
    found = []
    for count in (1, 2, 3):
        threads(count)
        ps = parameters(device)
        optimizer = NTASGD(ps, 0.3, max_norm=0.7)
        optimizer.start_averaging()
        for step in range(3):
            draw_gradients(step, ps)
            optimizer.step()
        found.append([*ps, *(a for _, a in optimizer.averages()), optimizer.grad_norm])
    assert all(torch.equal(a, b) for more in found[1:] for a, b in zip(found[0], more, strict=True))


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "a slice": lambda t: torch.cat([t, t], 1)[:, : t.size(1)],
    "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("gradient_layout", LAYOUTS)
@pytest.mark.parametrize("parameter_layout", LAYOUTS)
def test_any_layout(parameter_layout, gradient_layout, device):
    start = torch.randn(5, 24, device=device)
    plain, p = nn.Parameter(start.clone()), nn.Parameter(LAYOUTS[parameter_layout](start))
    optimizers = [NTASGD([q], 0.3, max_norm=0.5, weight_decay=0.1) for q in (plain, p)]
    for step in range(4):
        draw_gradients(step, [plain])
        p.grad = LAYOUTS[gradient_layout](plain.grad)
        for optimizer in optimizers:
            optimizer.start_averaging()
            optimizer.step()
    torch.testing.assert_close(p, plain)
    torch.testing.assert_close(*(o.averages()[0][1] for o in optimizers))


def test_a_sparse_gradient_equals_a_dense_one(device):
    dense, sparse = twins(device, shapes=[(7, 4)])
    ids = torch.tensor([1, 3, 3], device=device)
    optimizers = [NTASGD(ps, 0.3, max_norm=0.5, weight_decay=0.1) for ps in (dense, sparse)]
    for _ in range(4):
        for ps, is_sparse, optimizer in (
            (dense, False, optimizers[0]),
            (sparse, True, optimizers[1]),
        ):
            optimizer.zero_grad()
            nn.functional.embedding(ids, ps[0], sparse=is_sparse).square().sum().backward()
            optimizer.start_averaging()
            optimizer.step()
    torch.testing.assert_close(sparse, dense)


def test_parameters_without_a_gradient_are_unchanged(device):
    """As in torch: they are not updated, not averaged, and their step count does not grow."""
    ours, theirs = twins(device)
    optimizer = NTASGD(ours, 0.1)
    optimizer.step()
    optimizer.start_averaging()
    other = torch.optim.ASGD(theirs, 0.1, lambd=0.0, t0=0)
    for step in range(9):
        draw_gradients(step, ours, theirs)
        for i in (1, 2) if step % 3 == 0 else (3,):
            ours[i].grad = theirs[i].grad = None
        optimizer.step()
        other.step()
    torch.testing.assert_close(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(optimizer.state[p]["average"], other.state[q]["ax"])


def test_parameter_groups_and_mixed_dtypes(device):
    ours, theirs = twins(device), None
    wide = parameters(device, torch.float64)
    groups = [
        {"params": ours[0], "lr": 0.5},
        {"params": ours[1], "weight_decay": 0.2},
        {"params": wide},
    ]
    optimizer = NTASGD(groups, 0.1, max_norm=2.0)
    theirs = [[nn.Parameter(p.detach().clone()) for p in group["params"]] for group in groups]
    other = torch.optim.SGD(
        [{**group, "params": ps} for group, ps in zip(groups, theirs, strict=True)], 0.1
    )
    for step in range(4):
        draw_gradients(step, *ours, wide, *theirs)
        nn.utils.clip_grad_norm_([p for ps in theirs for p in ps], 2.0)
        optimizer.step()
        other.step()
    assert optimizer.grad_norm.dtype == torch.float64
    for group, ps in zip(groups, theirs, strict=True):
        torch.testing.assert_close(list(group["params"]), ps)


def test_more_tensors_than_one_launch_takes(device):
    ours, theirs = twins(device, shapes=[(n % 9,) for n in range(150)])
    optimizer, other = NTASGD(ours, 0.3, max_norm=0.5), torch.optim.SGD(theirs, 0.3)
    draw_gradients(0, ours, theirs)
    nn.utils.clip_grad_norm_(theirs, 0.5)
    optimizer.step()
    other.step()
    torch.testing.assert_close(ours, theirs)


def test_step_without_gradients_and_with_a_closure():
    (p,) = parameters(shapes=[(3,)])
    optimizer = NTASGD([p], 0.1, max_norm=1.0)
    assert optimizer.step() is None
    assert optimizer.grad_norm == 0

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > p.square().sum()


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1.0), ("lr", math.nan), ("weight_decay", -0.1), ("max_norm", -1), ("n", 0)],
)
def test_wrong_settings_are_named(name, value):
    with pytest.raises(ValueError, match=rf"^NTASGD: {name} must be at least \d ?, got"):
        NTASGD(parameters(), **{"lr": 0.1, name: value})


@pytest.mark.parametrize("other", [torch.float16, torch.complex64], ids=str)
def test_wrong_dtype_is_named(other):
    with pytest.raises(
        TypeError, match=f"^NTASGD: parameters must be float32, float64 or bfloat16, got {other}"
    ):
        NTASGD(parameters(dtype=other), 0.1)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("lr", None, "a number, got NoneType"),
        ("lr", "a", "a number, got str"),
        ("weight_decay", None, "a number, got NoneType"),
        ("max_norm", "a", "a number, got str"),
        ("n", None, "a whole number, got NoneType"),
        ("n", 2.5, "a whole number, got float"),
    ],
)
def test_settings_of_a_wrong_type_are_named(name, value, wanted):
    with pytest.raises(TypeError, match=f"^NTASGD: {name} must be {wanted}$"):
        NTASGD(parameters(), **{"lr": 0.1, name: value})


def test_a_group_that_is_refused_is_not_added():
    optimizer = NTASGD(parameters(), 0.1)
    with pytest.raises(TypeError, match="NTASGD: parameters must be"):
        optimizer.add_param_group({"params": parameters(dtype=torch.float16)})
    with pytest.raises(ValueError, match=r"NTASGD: lr must be at least 0, got -1\.0"):
        optimizer.add_param_group({"params": parameters(), "lr": -1.0})
    with pytest.raises(TypeError, match="NTASGD: weight_decay must be a number, got str"):
        optimizer.add_param_group({"params": parameters(), "weight_decay": "a"})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": parameters(dtype=torch.bfloat16)})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("loaded", OWN, ids=str)
@pytest.mark.parametrize("saved", OWN, ids=str)
def test_averages_are_loaded_in_the_dtype_that_a_step_takes(saved, loaded):
    first = NTASGD([nn.Parameter(torch.ones(2, dtype=saved))], 0.1)
    second = NTASGD([nn.Parameter(torch.ones(2, dtype=loaded))], 0.1)
    for optimizer in (first, second):
        ((p,),) = (group["params"] for group in optimizer.param_groups)
        p.grad = torch.ones_like(p)
    first.start_averaging()
    for _ in range(2):
        first.step()
    second.load_state_dict(first.state_dict())
    ((_, kept),), ((_, average),) = first.averages(), second.averages()
    assert average.dtype == (torch.float64 if loaded == torch.float64 else torch.float32)
    torch.testing.assert_close(average.double(), kept.double())
    second.step()


def test_the_state_of_another_optimizer_is_refused():
    params = parameters()
    with pytest.raises(ValueError, match=r"^NTASGD: state_dict must be that of an NTASGD, got"):
        NTASGD(params, 0.1).load_state_dict(torch.optim.SGD(params, 0.1).state_dict())


def test_an_interval_below_one_is_refused():
    with pytest.raises(ValueError, match=r"^non_monotone: n must be at least 1, got 0"):
        non_monotone([1.0, 2.0], 1.5, n=0)


def test_a_backward_after_a_step_raises(device):
    """It needs the parameter's old values, as after a step of torch's optimizers."""
    x = torch.randn(3, 4, device=device, requires_grad=True)
    w = torch.randn(4, 5, device=device, requires_grad=True)
    y = (x @ w).tanh()
    w.grad = torch.ones_like(w)
    NTASGD([w], 0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("computing", [torch.float32, torch.float64])
def test_a_step_without_data(computing):
    with FakeTensorMode():
        w = torch.randn(4, 5, dtype=computing, requires_grad=True)
        w.grad = torch.ones_like(w)
        optimizer = NTASGD([w], 0.1, max_norm=1.0)
        optimizer.start_averaging()
        optimizer.step()
        assert optimizer.grad_norm.shape == ()
        assert optimizer.grad_norm.dtype == computing


def test_a_loss_that_is_nan_is_never_the_best():
    optimizer = NTASGD(parameters(), 0.1, n=1)
    assert [optimizer.observe(loss) for loss in (math.nan, 5.0, 4.0, 6.0)] == [*[False] * 3, True]


def test_losses_are_stored_as_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    optimizer = NTASGD(parameters(), 0.1)
    for loss in (numpy.float32(0.5), torch.tensor(0.5, requires_grad=True), 1):
        optimizer.observe(loss)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["losses"] == [0.5, 0.5, 1.0]


def test_averages_have_gradients(device):
    ps = parameters(device)
    optimizer = NTASGD(ps, 0.3)
    optimizer.start_averaging()
    draw_gradients(0, ps)
    optimizer.step()
    with optimizer.averaged():
        found = torch.autograd.grad(sum(p.square().sum() for p in ps), ps)
        torch.testing.assert_close(found, tuple(2 * p.detach() for p in ps))


def test_a_state_and_the_optimizers_that_loaded_it_share_no_losses():
    first, second = (NTASGD(parameters(), 0.1) for _ in range(2))
    first.observe(3.0)
    state = first.state_dict()
    second.load_state_dict(state)
    first.observe(2.0)
    second.observe(1.0)
    assert (state["losses"], first.losses, second.losses) == ([3.0], [3.0, 2.0], [3.0, 1.0])


@pytest.mark.parametrize("loss", ["high", None, True, torch.zeros(2)], ids=str)
def test_a_loss_that_is_not_a_number_is_refused(loss):
    with pytest.raises(TypeError, match=r"^NTASGD: loss must be a number, got "):
        NTASGD(parameters(), 0.1).observe(loss)


@pytest.mark.parametrize("n", [1.5, True, "1"])
def test_an_interval_that_is_not_a_whole_number_is_refused(n):
    with pytest.raises(TypeError, match=r"^non_monotone: n must be a whole number, got "):
        non_monotone([1.0], 2.0, n)


def trained(model, steps):
    """An NTASGD of the model after some steps, whose averaging starts at the second of them."""
    optimizer = NTASGD(model.parameters(), 0.1, n=1)
    for step in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.observe(float(step))
    return optimizer


@pytest.mark.parametrize("steps", [1, 5])  # before and after the trigger
def test_distributed_checkpoints_hold_the_whole_state(steps):
    checkpoint = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, loaded = trained(model, steps), NTASGD(other.parameters(), 0.5, n=1)
    state = checkpoint.get_optimizer_state_dict(model, optimizer)
    checkpoint.set_optimizer_state_dict(other, loaded, state)
    assert (loaded.averaging, loaded.losses) == (steps > 1, optimizer.losses)
    assert loaded.param_groups[0]["lr"] == 0.1
    for (_, average), (_, expected) in zip(loaded.averages(), optimizer.averages(), strict=True):
        assert torch.equal(average, expected)
