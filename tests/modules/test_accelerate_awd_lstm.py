"""accelerate on classes with the layout of AWD-LSTM's WeightDrop and LockedDropout."""

import copy
import io

import fusedseq
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("in_exact_dtype")
T, B, X, H = 5, 4, 6, 7


def do_nothing():
    pass


class LockedDropout(nn.Module):
    def forward(self, x, dropout=0.5):
        if not self.training or not dropout:
            return x
        kept = torch.empty_like(x[:1]).bernoulli_(1 - dropout)
        return x * (kept / (1 - dropout))


class WeightDrop(nn.Module):
    def __init__(self, module, weights, dropout=0, variational=False):
        super().__init__()
        self.module, self.weights = module, weights
        self.dropout, self.variational = dropout, variational
        module.flatten_parameters = do_nothing
        for name in weights:
            weight = module._parameters.pop(name)
            module.register_parameter(f"{name}_raw", nn.Parameter(weight.data))

    def _setweights(self):
        for name in self.weights:
            raw = getattr(self.module, f"{name}_raw")
            dropped = nn.functional.dropout(raw, self.dropout, training=self.training)
            setattr(self.module, name, dropped + 0)

    def forward(self, *args):
        self._setweights()
        return self.module.forward(*args)


class Model(nn.Module):
    def __init__(self, p=0.5, layers=2):
        super().__init__()
        names = [f"weight_hh_l{l}" for l in range(layers)]
        self.lockdrop = LockedDropout()
        self.rnn = WeightDrop(nn.LSTM(X, H, layers), names, p)

    def forward(self, x):
        return self.rnn(self.lockdrop(x, 0.4))[0]


def run(model, x):
    y = model(x)
    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    return y, torch.autograd.grad((y * weight).sum(), [*model.parameters()])


def test_results_and_gradients_are_the_same_in_eval_mode_and_undo_restores_every_bit():
    model, x = Model().eval(), torch.randn(T, B, X)
    parameters, expected = dict(model.named_parameters()), run(model, x)
    state = [*model.state_dict()]
    report = fusedseq.accelerate(model)
    assert {e.name for e in report.replaced} == {"lockdrop", "rnn", "rnn.module"}
    assert {"rnn.module.weight_hh_l1_raw", "rnn.module.weight_ih_l0"} <= {*state}
    torch.testing.assert_close(run(model, x), expected)
    assert [*model.state_dict()] == state
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert fusedseq.accelerate(model).entries == []
    report.undo()
    torch.testing.assert_close(run(model, x), expected, rtol=0, atol=0)


def test_switching_between_modes_and_undoing_in_training_works():
    model, x = Model(), torch.randn(T, B, X)
    report = fusedseq.accelerate(model)
    for training in (True, False, True):
        model.train(training)
        assert len(run(model, x)[1]) == len([*model.parameters()]) == 8
    report.undo()
    assert len(run(model, x)[1]) == 8


def test_weights_are_dropped_with_the_same_strength_and_one_mask_for_all_steps():
    """With a gate that is linear in W_hh, h shows which elements were dropped."""
    p = 0.3
    model = WeightDrop(nn.LSTM(X, 200), ["weight_hh_l0"], p)
    raw = model.module.weight_hh_l0_raw
    fusedseq.accelerate(model)
    model(torch.randn(T, B, X))
    used = model.module.weight_hh_l0
    kept = used != 0
    # 160,000 elements: the standard deviation of the fraction is 0.0012.
    assert (~kept).double().mean().item() == pytest.approx(p, abs=0.006)
    torch.testing.assert_close(used[kept], raw[kept] / (1 - p))
    before = used
    model(torch.randn(T, B, X))
    assert ((model.module.weight_hh_l0 != 0) != (before != 0)).any()


def test_dropped_recurrent_weights_get_the_gradient_of_torch():
    model, x = WeightDrop(nn.LSTM(X, H), ["weight_hh_l0"], 0.5), torch.randn(T, B, X)
    fusedseq.accelerate(model)
    y = model(x)[0]
    plain = nn.LSTM(X, H)
    weights = model.module
    plain.load_state_dict({name: getattr(weights, name).detach() for name in plain.state_dict()})
    expected = plain(x)[0]
    torch.testing.assert_close(y, expected)
    expected.sum().backward()
    y.sum().backward()
    kept = weights.weight_hh_l0 != 0
    scaled = torch.where(kept, 2 * plain.weight_hh_l0.grad, 0)
    torch.testing.assert_close(weights.weight_hh_l0_raw.grad, scaled)


def test_locked_dropout_has_the_same_strength_and_one_mask_for_all_steps():
    model, x = nn.Sequential(LockedDropout()), torch.ones(3, 100, 500)
    fusedseq.accelerate(model)
    y = model(x)
    assert (y == y[:1]).all()
    # 50,000 elements: the standard deviation of the fraction is 0.0022.
    assert (y == 0).double().mean().item() == pytest.approx(0.5, abs=0.011)
    torch.testing.assert_close(y.max(), torch.tensor(2.0))
    y = model[0](x, 0.2)
    assert (y == 0).double().mean().item() == pytest.approx(0.2, abs=0.009)
    torch.testing.assert_close(y.max(), torch.tensor(1.25))
    assert model[0](x, 0.0) is x
    assert model.eval()(x) is x


def test_the_default_of_locked_dropout_is_that_of_its_class():
    def forward(self, x, dropout=0.2):
        return LockedDropout.forward(self, x, dropout)

    kind = type("LockedDropout", (nn.Module,), {"forward": forward})
    model = nn.Sequential(kind())
    assert fusedseq.accelerate(model).replaced
    y = model(torch.ones(3, 100, 500))
    error = 4 * (0.2 * 0.8 / y[0].numel()) ** 0.5  # four standard errors
    assert (y == 0).double().mean().item() == pytest.approx(0.2, abs=error)
    torch.testing.assert_close(y.max(), torch.tensor(1.25))


def test_a_copy_and_a_saved_module_are_accelerated_too():
    model = Model().eval()
    fusedseq.accelerate(model)
    file, x = io.BytesIO(), torch.randn(T, B, X)
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        torch.testing.assert_close(other(x), model(x))


def test_looking_at_a_class_changes_no_random_number():
    model = Model()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fusedseq.accelerate(model, dry_run=True)
    torch.testing.assert_close(torch.rand(4), expected)


def weight_drop(**changes):
    module = WeightDrop(nn.LSTM(X, H), ["weight_hh_l0"], 0.5)
    vars(module).update(changes)
    return module


def gru():
    return WeightDrop(nn.GRU(X, H), ["weight_hh_l0"], 0.5)


def registered_twice():
    module = weight_drop()
    module.module.weight_hh_l0 = module.module.weight_hh_l0_raw
    return module


def named_locked_dropout(forward):
    return type("LockedDropout", (nn.Module,), {"forward": forward})()


LEFT = {
    "variational": (lambda: weight_drop(variational=True), "variational"),
    "input weights": (lambda: WeightDrop(nn.LSTM(X, H), ["weight_ih_l0"], 0.5), "layout"),
    "names": (lambda: weight_drop(weights="weight_hh_l0"), "layout"),
    "probability": (lambda: weight_drop(dropout=1.5), "layout"),
    "gru": (gru, "layout"),
    "registered": (registered_twice, "layout"),
    "bidirectional": (
        lambda: WeightDrop(nn.LSTM(X, H, bidirectional=True), ["weight_hh_l0"], 0.5),
        "bidirectional",
    ),
    "not locked": (
        lambda: named_locked_dropout(
            lambda self, x, dropout=0.5: nn.functional.dropout(x, dropout, self.training)
        ),
        "LockedDropout",
    ),
    "not scaled": (
        lambda: named_locked_dropout(
            lambda self, x, dropout=0.5: x * torch.empty_like(x[:1]).bernoulli_(1 - dropout)
        ),
        "LockedDropout",
    ),
    "arguments": (lambda: named_locked_dropout(lambda self, x: x), "LockedDropout"),
    "fails": (lambda: named_locked_dropout(lambda self, x, dropout=0.5: x @ x), "LockedDropout"),
}


@pytest.mark.parametrize("name", LEFT)
def test_another_layout_is_left_with_a_reason(name):
    build, reason = LEFT[name]
    model = build()
    before = type(model)
    report = fusedseq.accelerate(model)
    assert type(model) is before
    assert reason in report.left[0].reason


@pytest.mark.cpu
def test_weights_in_a_dtype_without_kernels_are_dropped_by_torch():
    model = WeightDrop(nn.LSTM(X, H), ["weight_hh_l0"], 0.5).half()
    fusedseq.accelerate(model)
    model._setweights()
    used, raw = model.module.weight_hh_l0, model.module.weight_hh_l0_raw
    kept = used != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(used[kept], raw[kept] * 2)
