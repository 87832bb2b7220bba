"""Recurrent modules: equality of both operator sets, torch.nn.LSTM, and the published formulas."""

import copy

import pytest
import torch
from fusedseq import fused, nn, reference
from torch import nn as torch_nn
from torch.nn.utils import rnn

from tests.support.judge import equal_modules

AWD = {"dropout": 0.3, "weight_drop": 0.4}
CAPPED = {"cap_input_gate": True, "locked_input": False}
SUM = {"residual": True, "output": "sum"}
MOGRIFIER = {
    **AWD,
    "rounds": 4,
    "input_dropout": 0.2,
    "state_dropout": 0.3,
    "zoneout_h": 0.1,
    "zoneout_c": 0.2,
}
RECURRENT = {
    "lstm": lambda **k: nn.LSTM(6, 5, 2, **k),
    "lstm-awd": lambda **k: nn.LSTM(6, 5, 3, **AWD, **k),
    "lstm-variational-residual-sum": lambda **k: nn.LSTM(
        6, 6, 3, **AWD, variational=True, **SUM, **k
    ),
    "lstm-sizes": lambda **k: nn.LSTM(6, [7, 3], 2, **AWD, forget_bias=1.0, **k),
    "lstm-nobias-batchfirst": lambda **k: nn.LSTM(
        6, 5, 2, bias=False, batch_first=True, **AWD, **k
    ),
    "mogrifier": lambda **k: nn.MogrifierLSTM(6, 5, 2, **MOGRIFIER, **k),
    "mogrifier-rank": lambda **k: nn.MogrifierLSTM(6, 5, 2, rank=2, **CAPPED, **MOGRIFIER, **k),
    "mogrifier-shared-sum": lambda **k: nn.MogrifierLSTM(
        6, 6, 3, share_rounds=True, **SUM, **MOGRIFIER, **k
    ),
    "mogrifier-three-sum": lambda **k: nn.MogrifierLSTM(6, 6, 3, output="sum", **MOGRIFIER, **k),
    "mogrifier-sizes": lambda **k: nn.MogrifierLSTM(
        6, [7, 3], 2, mogrifier_bias=False, **MOGRIFIER, **k
    ),
}
T, B, X = 5, 4, 6
recurrent = pytest.mark.parametrize("name", RECURRENT)


def pair(build, device):
    """The module with the fused operators, and twice with the oracles, with equal parameters."""
    modules = [build(ops=ops).to(device) for ops in (fused, reference, reference)]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    return modules


def sequence(device, module=None):
    shape = (B, T, X) if module is not None and module.batch_first else (T, B, X)
    return torch.randn(shape, device=device)


@recurrent
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_fused_equals_reference(name, training, device):
    modules = [m.train(training) for m in pair(RECURRENT[name], device)]
    equal_modules(*modules, [sequence(device, modules[0])])


@recurrent
def test_fused_equals_reference_with_lengths(name, device):
    modules, lengths = pair(RECURRENT[name], device), torch.tensor([5, 0, 2, 1], device=device)
    equal_modules(
        *modules, [sequence(device, modules[0]), lengths], call=lambda m, x, n: m(x, lengths=n)
    )


@recurrent
def test_both_operator_sets_have_one_state_dict_and_initialization(name):
    dicts = []
    for ops in (fused, reference):
        torch.manual_seed(8)
        dicts.append(RECURRENT[name](ops=ops).state_dict())
    assert list(dicts[0]) == list(dicts[1])
    assert all(torch.equal(dicts[0][k], dicts[1][k]) for k in dicts[0])


class Model(torch_nn.Module):
    """A small language model with every regularization of AWD-LSTM."""

    def __init__(self, build, ops):
        super().__init__()
        self.embedding = nn.Embedding(11, X, dropout=0.2, ops=ops)
        self.locked = nn.LockedDropout(0.2, ops=ops)
        self.lstm = build(ops=ops)
        self.plain = nn.Dropout(0.3, ops=ops)
        self.decoder = torch_nn.Linear(self.lstm.sizes[-1][1], 11)
        self.regularization = ops.activation_regularization

    def forward(self, ids):
        raw, state = self.lstm(self.locked(self.embedding(ids)))
        dropped = self.plain(raw)
        loss = torch_nn.functional.cross_entropy(self.decoder(dropped).flatten(0, 1), ids.flatten())
        return loss + self.regularization(dropped, raw, 2.0, 1.0), state


@recurrent
def test_a_model_with_all_regularizations(name, device):
    modules = [Model(RECURRENT[name], ops).to(device) for ops in (fused, reference, reference)]
    for module in modules[1:]:
        module.load_state_dict(modules[0].state_dict())
    equal_modules(*modules, [torch.arange(T * B, device=device).reshape(T, B).square() % 11])


@recurrent
def test_manual_seed_reproduces(name, ops, device):
    module = RECURRENT[name](ops=ops).to(device)
    x, outputs = sequence(device, module), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(module(x)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert name == "lstm" or not torch.equal(outputs[0], outputs[2])


@recurrent
def test_eval_mode_applies_no_mask_and_draws_no_seed(name, ops, device):
    module = RECURRENT[name](ops=ops).to(device).eval()
    x = sequence(device, module)
    before = torch.get_rng_state()
    first, second = module(x)[0], module(x)[0]
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    for probability in ("input_dropout", "dropout", "state_dropout", "weight_drop"):
        setattr(module, probability, 0.0)
    if isinstance(module, nn.LSTM):
        module.layer_dropout.p = 0.0
    assert torch.equal(module(x)[0], first)


@recurrent
def test_deepcopy_and_state_dict(name, ops, device, tmp_path):
    module = RECURRENT[name](ops=ops).to(device).eval()
    x = sequence(device, module)
    expected = module(x)[0]
    assert torch.equal(copy.deepcopy(module)(x)[0], expected)
    torch.save(module.state_dict(), tmp_path / "state")
    other = RECURRENT[name](ops=reference if ops is fused else fused).to(device).eval()
    other.load_state_dict(torch.load(tmp_path / "state"))
    torch.testing.assert_close(other(x)[0], expected)


@recurrent
def test_training_continues_with_the_other_operator_set(name, device):
    """A checkpoint of ops=reference after two steps continues with ops=fused.

    The optimizer state and the random masks are the same.
    """
    losses = []
    for second in (reference, fused):
        torch.manual_seed(5)
        module = RECURRENT[name](ops=reference).to(device)
        optimizer = torch.optim.Adam(module.parameters())
        for step in range(4):
            if step == 2:
                checkpoint = module.state_dict(), optimizer.state_dict(), torch.get_rng_state()
                module = RECURRENT[name](ops=second).to(device)
                optimizer = torch.optim.Adam(module.parameters())
                module.load_state_dict(checkpoint[0])
                optimizer.load_state_dict(checkpoint[1])
                torch.set_rng_state(checkpoint[2])
            x = torch.linspace(-1, 1, T * B * X, device=device).reshape(
                sequence(device, module).shape
            )
            loss = module(x)[0].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)


@recurrent
def test_weights_are_never_masked_in_place(name, ops, device):
    """W_hh itself receives the gradient through the mask, which is 0 for dropped elements."""
    module = RECURRENT[name](ops=ops).to(device)
    before = copy.deepcopy(module.state_dict())
    y, (h, c) = module(sequence(device, module))
    (y.sum() + sum(t.sum() for t in (*h, *c))).backward()
    assert all(torch.equal(p, before[k]) for k, p in module.state_dict().items())
    grads = [p.grad for k, p in module.named_parameters() if k.startswith("weight_hh")]
    assert len(grads) == module.num_layers
    assert all(g.any() for g in grads)
    if module.weight_drop:
        assert all((g == 0).any() for g in grads)


def torch_lstm(module):
    """A torch.nn.LSTM with the same parameters."""
    hidden = module.sizes[0][1]
    other = torch_nn.LSTM(
        module.input_size, hidden, module.num_layers, module.bias, batch_first=module.batch_first
    )
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"batch_first": True}], ids=str)
def test_lstm_equals_torch_nn_lstm(layers, options, device):
    module = nn.LSTM(X, 5, layers, **options).to(device)
    state = torch.randn(2, layers, B, 5, device=device)
    plain, exact = (torch_lstm(module).to(device) for _ in range(2))
    equal_modules(module, plain, exact, [sequence(device, module)])
    given = [sequence(device, module), *state]
    equal_modules(module, plain, exact, given, call=lambda m, x, h, c: m(x, (h, c)))


@pytest.mark.parametrize("layers", [1, 2])
def test_lstm_loads_the_state_dict_of_torch_nn_lstm(layers, device):
    theirs = torch_nn.LSTM(X, 5, layers).to(device)
    ours = nn.LSTM(X, 5, layers).to(device)
    assert not any(ours.load_state_dict(theirs.state_dict()))
    x = sequence(device)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_gives_the_results_of_torch_nn_lstm(enforce_sorted, device):
    lengths = [5, 3, 2, 1] if enforce_sorted else [2, 5, 1, 3]
    module = nn.LSTM(X, 5, 2).to(device)
    plain, exact = (torch_lstm(module).to(device) for _ in range(2))

    def call(m, x):
        y, state = m(rnn.pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted))
        assert y.batch_sizes.tolist() == [sum(n > t for n in lengths) for t in range(5)]
        return rnn.pad_packed_sequence(y)[0], state

    equal_modules(module, plain, exact, [sequence(device)], call=call)


@recurrent
def test_a_packed_sequence_equals_lengths(name, ops, device):
    module = RECURRENT[name](ops=ops).to(device)
    x, lengths = torch.randn(T, B, X, device=device), torch.tensor([2, 5, 1, 3])
    packed = rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    y, state = module.eval()(packed)
    expected, expected_state = module(
        x.transpose(0, 1) if module.batch_first else x, lengths=lengths
    )
    expected = expected.transpose(0, 1) if module.batch_first else expected
    torch.testing.assert_close(rnn.pad_packed_sequence(y)[0], expected)
    torch.testing.assert_close(state, expected_state)


@recurrent
def test_two_segments_with_carried_state_equal_one(name, ops, device):
    module = RECURRENT[name](ops=ops).to(device).eval()
    x, time = sequence(device, module), 1 if module.batch_first else 0
    y, state = module(x)
    first, middle = module(x.narrow(time, 0, 2))
    second, last = module(x.narrow(time, 2, T - 2), middle)
    torch.testing.assert_close((torch.cat([first, second], time), last), (y, state))


@pytest.mark.parametrize(
    "build",
    [nn.LSTM, nn.MogrifierLSTM, nn.GRU, nn.RNN, nn.PeepholeLSTM, nn.LayerNormLSTM, nn.LayerNormGRU],
)
def test_residual_and_sum_equal_explicit_additions(build, ops, device):
    module = build(X, X, 3, residual=True, output="sum", ops=ops).to(device)
    layers = [build(X, X, ops=ops).to(device) for _ in range(3)]
    for l, layer in enumerate(layers):
        layer.load_state_dict(
            {
                k.replace(f"_l{l}", "_l0"): v
                for k, v in module.state_dict().items()
                if k.endswith(f"_l{l}")
            }
        )
    x = sequence(device)
    y1, _ = layers[0](x)
    y2, _ = layers[1](y1 + x)
    y3, _ = layers[2](y2 + y1)
    torch.testing.assert_close(module(x)[0], y1 + y2 + y3)


def test_dropout_applies_between_layers_only(ops, device):
    """With p = 1 layer 2 reads zeros, while layer 1 and the output are unchanged."""
    module = nn.LSTM(X, 5, 2, dropout=1.0, ops=ops).to(device)
    changed = nn.LSTM(X, 5, 2, dropout=1.0, ops=ops).to(device)
    changed.load_state_dict(module.state_dict())
    x = sequence(device)
    y, (h, _) = module(x)
    other, (h_other, _) = changed(x + 1)
    assert torch.equal(y, other)
    assert not torch.equal(h[0], h_other[0])
    assert y.any()


def test_forget_bias(ops):
    bias = nn.LSTM(3, 4, forget_bias=1.0, ops=ops)
    assert torch.equal((bias.bias_ih_l0 + bias.bias_hh_l0)[4:8], torch.ones(4))


def test_mogrifier_low_rank_initialization():
    """A normal distribution truncated at two standard deviations; zero biases.

    The standard deviation before truncation is (1 / (fan_in rank))**(1/4).
    """
    module = nn.MogrifierLSTM(200, 300, rounds=2, rank=50)
    for name, fan_in in (("Q_A", 300), ("Q_B", 300), ("R_A", 200), ("R_B", 200)):
        weight, std = getattr(module, f"{name}_l0"), (1 / (fan_in * 50)) ** 0.25
        assert weight.abs().max() <= 2 * std
        # Truncation at 2 standard deviations reduces the standard deviation to 0.88 of its value.
        assert 0.85 * std < weight.std() < 0.91 * std
    assert not module.Q_bias_l0.any()
    assert not module.R_bias_l0.any()


BAD = {
    "rounds": (lambda: nn.MogrifierLSTM(3, 4, rounds=-1), r"MogrifierLSTM: rounds .* got -1"),
    "rank": (lambda: nn.MogrifierLSTM(3, 4, rank=0), r"MogrifierLSTM: rank .* got 0"),
    "zoneout": (
        lambda: nn.MogrifierLSTM(3, 4, zoneout_h=1.1),
        r"MogrifierLSTM: zoneout_h .* got 1.1",
    ),
    "dropout": (lambda: nn.LSTM(3, 4, dropout=-0.1), r"LSTM: dropout .* got -0.1"),
    "nan": (lambda: nn.Dropout(float("nan")), r"Dropout: p .* got nan"),
    "embedding": (lambda: nn.Embedding(3, 4, dropout=2.0), r"Embedding: dropout .* got 2.0"),
    "layers": (lambda: nn.LSTM(3, 4, 0), r"LSTM: .*num_layers"),
    "sizes": (lambda: nn.LSTM(3, [4, 5], 3), r"LSTM: hidden_size .* got \[4, 5\]"),
    "size": (lambda: nn.LSTM(0, 4), r"LSTM: input_size .* got 0 and 4"),
    "output": (lambda: nn.LSTM(3, 4, output="mean"), r"LSTM: output .* got 'mean'"),
    "sum": (lambda: nn.LSTM(3, [4, 5], 2, output="sum"), r"LSTM: output .* got \[4, 5\]"),
    "residual": (lambda: nn.LSTM(3, 4, 2, residual=True), r"LSTM: residual .* got 3 and \[4, 4\]"),
    "x": (
        lambda: nn.LSTM(3, 4)(torch.zeros(2, 5, 4)),
        r"LSTM: x must be \(T, B, 3\), or \(T, 3\) without .*, got \(2, 5, 4\)",
    ),
    "x dimensions": (
        lambda: nn.LSTM(3, 4)(torch.zeros(3)),
        r"LSTM: x must be \(T, B, 3\), or \(T, 3\) without .*, got \(3,\)",
    ),
    "unbatched lengths": (
        lambda: nn.LSTM(3, 4)(torch.zeros(2, 3), lengths=[2]),
        r"LSTM: lengths must be None for an x without a batch dimension",
    ),
    "unbatched state": (
        lambda: nn.LSTM(3, 4)(torch.zeros(2, 3), torch.zeros(2, 1, 1, 4)),
        r"LSTM: state must be \(h, c\), each \(num_layers, H\) or .* got a tensor \(2, 1, 1, 4\)",
    ),
    "state": (
        lambda: nn.LSTM(3, 4, 2)(torch.zeros(2, 1, 3), torch.zeros(2, 1, 1, 4)),
        r"LSTM: state must be \(h, c\), each \(num_layers, B, H\) or .* \(2, 1, 1, 4\)",
    ),
    "state size": (
        lambda: nn.LSTM(3, 4)(torch.zeros(2, 1, 3), torch.zeros(2, 1, 2, 4)),
        r"lstm: h0 .* got \(2, 4\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_rejected(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
