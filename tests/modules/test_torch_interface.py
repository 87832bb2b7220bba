"""What users of torch.nn expect of the modules of the same names: the order of the arguments,
weights that are parametrized and drawn again, and the methods and attributes of torch's modules.
"""

import inspect
import typing

import fusedseq
import pytest
import torch
from fusedseq import nn
from torch import fx
from torch.nn.utils import parametrizations, parametrize, prune

pytestmark = pytest.mark.cpu
X, H = 5, 4
# Positional arguments of torch's constructors that ours take by keyword, or do not have.
KEYWORDS = {
    "LSTM": "batch_first dropout bidirectional proj_size device dtype",
    "GRU": "batch_first dropout bidirectional device dtype",
    "RNN": "batch_first dropout bidirectional device dtype",
    "Embedding": "max_norm norm_type scale_grad_by_freq sparse _weight _freeze device dtype",
    "Dropout": "inplace",
}
# {argument of torch's forward: its name in our modules}
RENAMED = {
    "LSTM": {"input": "x", "hx": "state"},
    "GRU": {"input": "x", "hx": "state"},
    "RNN": {"input": "x", "hx": "state"},
    "Embedding": {"input": "ids"},
    "Dropout": {"input": "x"},
    "LinearCrossEntropyLoss": {"input": "x"},
}
# Arguments whose defaults differ: by default, our attention returns no probabilities, and key and
# value are query. The activation is the name of torch's function.
DEFAULTS = {"need_weights", "key", "value", "activation"}
MIRRORED = [name for name in nn.__all__ if hasattr(torch.nn, name)]
RECURRENT = {
    "LSTM": lambda: nn.LSTM(X, H, 2, proj_size=2, forget_bias=1.0),
    "GRU": lambda: nn.GRU(X, H, 2),
    "RNN": lambda: nn.RNN(X, H, 2),
    "MogrifierLSTM": lambda: nn.MogrifierLSTM(X, H, 2, rounds=3),
    "low-rank MogrifierLSTM": lambda: nn.MogrifierLSTM(X, H, 2, rounds=3, rank=2),
    "PeepholeLSTM": lambda: nn.PeepholeLSTM(X, H, 2),
    "LayerNormLSTM": lambda: nn.LayerNormLSTM(X, H, 2),
    "LayerNormGRU": lambda: nn.LayerNormGRU(X, H, 2),
}
recurrent = pytest.mark.parametrize("name", RECURRENT)


def positional(function):
    """The arguments that may be given by position, and their defaults."""
    overloads = typing.get_overloads(function)
    parameters = inspect.signature(overloads[0] if overloads else function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def differing(ours, theirs):
    return {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}


def test_the_mirrored_modules():
    assert {"LSTM", "GRU", "RNN", "MultiheadAttention", "TransformerEncoderLayer"} < {*MIRRORED}
    assert {"TransformerDecoderLayer", "Embedding", "Dropout"} < {*MIRRORED}


@pytest.mark.parametrize("name", MIRRORED)
def test_constructors_take_arguments_in_the_order_of_torch(name):
    ours, theirs = (positional(getattr(m, name).__init__) for m in (nn, torch.nn))
    assert [*ours] == [*theirs][: len(ours)]
    assert [*theirs][len(ours) :] == KEYWORDS.get(name, "").split()
    assert differing(ours, theirs) <= DEFAULTS


@pytest.mark.parametrize("name", MIRRORED)
def test_calls_take_arguments_in_the_order_of_torch(name):
    ours, theirs = (positional(getattr(m, name).forward) for m in (nn, torch.nn))
    renamed = {RENAMED.get(name, {}).get(key, key): value for key, value in theirs.items()}
    assert [*ours][: len(theirs)] == [*renamed]
    assert differing(ours, renamed) <= DEFAULTS


def test_rnn_takes_its_nonlinearity_by_position():
    theirs, ours = (module.RNN(X, H, 2, "relu", False) for module in (torch.nn, nn))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 2, X)
    torch.testing.assert_close(ours(x), theirs(x))


@recurrent
def test_parametrized_weights_are_drawn_again(name):
    """As those of torch's modules, in the order in which weights without parametrizations are."""
    plain, module = RECURRENT[name](), RECURRENT[name]()
    torch.manual_seed(5)
    plain.reset_parameters()
    for weight in [*dict(module.named_parameters())]:
        if getattr(module, weight).all():  # the weight norm of zeros is NaN
            parametrizations.weight_norm(module, weight)
    torch.manual_seed(5)
    module.reset_parameters()
    for weight, values in plain.named_parameters():
        torch.testing.assert_close(getattr(module, weight), values)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("how", ["parametrization", "pruning"])
@pytest.mark.parametrize(
    ("build", "weight"),
    [
        (nn.LSTM, "weight_hh_l0"),
        (nn.PeepholeLSTM, "peephole_l0"),
        (nn.LayerNormGRU, "gamma_hh_l0"),
        (nn.MogrifierLSTM, "Q_l0"),
    ],
)
def test_a_weight_that_cannot_be_drawn_again_is_named(build, weight, how):
    module = build(X, H)
    if how == "pruning":
        prune.random_unstructured(module, weight, 0.5)
    else:
        parametrize.register_parametrization(module, weight, Doubled())
    with pytest.raises(ValueError, match=f"{weight} must be a parameter, or have a parametrizatio"):
        module.reset_parameters()


@recurrent
def test_all_weights_are_the_parameters_of_each_layer(name):
    module = RECURRENT[name]()
    module.flatten_parameters()
    for l, weights in enumerate(module.all_weights):
        own = [p for key, p in module.named_parameters() if key.endswith(f"_l{l}")]
        assert {*map(id, weights)} == {*map(id, own)}


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_attributes_of_torch(name):
    options = {"dropout": 0.3, "bidirectional": True} | (
        {"nonlinearity": "relu"} if name == "RNN" else {}
    )
    ours, theirs = (getattr(module, name)(X, H, 2, **options) for module in (nn, torch.nn))
    ours.load_state_dict(theirs.state_dict())
    assert (ours.mode, ours.dropout) == (theirs.mode, theirs.dropout)
    torch.testing.assert_close(ours.all_weights, theirs.all_weights)
    ours.dropout = 0.0
    assert ours.layer_dropout.p == 0
    with pytest.raises(ValueError, match=rf"{name}: dropout must be in \[0, 1\], got 2"):
        ours.dropout = 2


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_accelerated_modules_have_the_attributes_of_torch(name):
    module = getattr(torch.nn, name)(X, H, 2, dropout=0.3)
    before = module.mode, module.dropout, module.all_weights
    fusedseq.accelerate(model := torch.nn.Sequential(module))
    assert type(model[0]).__module__.startswith("fusedseq.")
    assert (model[0].mode, model[0].dropout) == before[:2]
    model[0].dropout = 0.0
    model[0].flatten_parameters()
    assert all(
        a is b
        for found, wanted in zip(model[0].all_weights, before[2], strict=True)
        for a, b in zip(found, wanted, strict=True)
    )


def test_a_tracer_of_fx_takes_a_module_as_a_leaf():
    class Tracer(fx.Tracer):
        def is_leaf_module(self, module, name):
            ours = type(module).__module__.startswith("fusedseq.")
            return ours or super().is_leaf_module(module, name)

    model = torch.nn.Sequential(nn.Embedding(7, X), nn.LSTM(X, H))
    traced = fx.GraphModule(model, Tracer().trace(model))
    ids = torch.tensor([[1, 2], [0, 6]])
    torch.testing.assert_close(traced(ids), model(ids))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_module_is_traced_by_jit():
    module = nn.LSTM(X, H).eval()
    with torch.no_grad():
        traced = torch.jit.trace(module, (torch.randn(3, 2, X),))
        for shape in ((3, 2, X), (7, 4, X)):
            x = torch.randn(shape)
            torch.testing.assert_close(traced(x), module(x))


class SelfAttention(torch.nn.Module):
    """MultiheadAttention of one input. call: further arguments of its forward"""

    def __init__(self, call, **options):
        super().__init__()
        self.call = call
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x):
        return self.attention(x, x, x, **self.call)[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_self_attention_is_traced_by_jit():
    """For other lengths and batches too."""
    module = SelfAttention({}).eval()
    with torch.no_grad():
        traced = torch.jit.trace(module, (torch.randn(2, 4, 8),))
        for shape in ((2, 4, 8), (3, 7, 8)):
            x = torch.randn(shape)
            torch.testing.assert_close(traced(x), module(x))


LENGTHS = {  # option: (arguments of forward, of the constructor)
    "attn_mask": ({"attn_mask": torch.zeros(4, 4, dtype=torch.bool)}, {}),
    "key_padding_mask": ({"key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)}, {}),
    "key_lengths": ({"key_lengths": [4, 3]}, {}),
    "is_causal": ({"is_causal": True}, {}),
    "positions": ({}, {"positions": nn.ALiBi(2)}),
    "window": ({}, {"window": (1, 1)}),
    "softcap": ({}, {"softcap": 5.0}),
    "sinks": ({}, {"sinks": True}),
    "dropout": ({}, {"dropout": 0.5}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("option", LENGTHS)
def test_jit_refuses_attention_that_needs_the_lengths(option):
    call, options = LENGTHS[option]
    module = SelfAttention(call, **options).train(option == "dropout")
    wanted = rf"^MultiheadAttention: {option} must not be used under torch\.jit\.trace, .*, got "
    with torch.no_grad(), pytest.raises(NotImplementedError, match=wanted):
        torch.jit.trace(module, (torch.randn(2, 4, 8),))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_records_the_operations_of_torch_for_an_accelerated_model():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    fusedseq.accelerate(layer)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4)
    with torch.no_grad():
        example = {"src": torch.randn(2, 4, 8), "src_mask": mask}
        traced = torch.jit.trace(layer, example_kwarg_inputs=example)
        x = torch.randn(3, 4, 8)
        torch.testing.assert_close(traced(src=x, src_mask=mask), layer(x, src_mask=mask))
    assert "fusedseq::" not in str(traced.inlined_graph)
