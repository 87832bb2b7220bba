"""Models converted from torch's modules and AWD-LSTM's checkpoints compute the same results."""

import itertools

import pytest
import torch
from fusedseq.models import convert
from fusedseq.nn import Dropout
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.support.placement import exact

pytestmark = pytest.mark.usefixtures("on_device")
E, N, B, L, S, V = 12, 3, 4, 5, 6, 23
OPTIONS = {
    "post": {},
    "pre": {"norm_first": True},
    "gelu": {"activation": "gelu", "norm_first": True, "layer_norm_eps": 1e-3},
    "batch-first": {"batch_first": True, "activation": nn.GELU(approximate="tanh")},
    "no-bias": {"bias": False},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
LENGTHS = torch.tensor([6, 2, 1, 5])


def torch_layer(build, **options):
    layer = build(E, N, 20, 0.3, **options).to(exact()).eval()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer


def in_layout_of(x, theirs):
    return x if theirs.self_attn.batch_first else x.transpose(0, 1)


@options
@pytest.mark.parametrize("layers", [0, 2], ids=["layer", "stack"])
def test_encoder_equals_torch(options, layers, ops):
    layer = torch_layer(nn.TransformerEncoderLayer, **options)
    theirs = layer
    if layers:
        norm = nn.LayerNorm(E, layer.norm1.eps, bias="bias" not in options, dtype=exact())
        theirs = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False).eval()
        nn.init.normal_(theirs.norm.weight)
        nn.init.normal_(theirs.layers[1].linear1.weight)
    ours, x = convert.encoder(theirs, ops=ops), torch.randn(B, S, E, dtype=exact())
    lengths = LENGTHS.to(x.device)
    present = torch.arange(S) < lengths[:, None]
    expected = in_layout_of(theirs(in_layout_of(x, layer), src_key_padding_mask=~present), layer)
    torch.testing.assert_close(ours(x, lengths)[present], expected[present])
    torch.testing.assert_close(ours(x), in_layout_of(theirs(in_layout_of(x, layer)), layer))
    assert not ours.training
    assert ours.layers[0].norm2.dropout == 0.3


@options
@pytest.mark.parametrize("layers", [0, 2], ids=["layer", "stack"])
def test_decoder_equals_torch(options, layers, ops):
    layer = torch_layer(nn.TransformerDecoderLayer, **options)
    theirs = nn.TransformerDecoder(layer, layers).eval() if layers else layer
    if layers:
        nn.init.normal_(theirs.layers[1].linear1.weight)
    ours = convert.decoder(theirs, ops=ops)
    x, memory = torch.randn(B, L, E, dtype=exact()), torch.randn(B, S, E, dtype=exact())
    lengths = LENGTHS.to(x.device)
    expected = theirs(
        in_layout_of(x, layer),
        in_layout_of(memory, layer),
        torch.ones(L, L, dtype=torch.bool).triu(1),
        memory_key_padding_mask=torch.arange(S) >= lengths[:, None],
    )
    torch.testing.assert_close(ours(x, memory, lengths), in_layout_of(expected, layer))


def test_conversion_copies_the_weights(ops):
    layer = torch_layer(nn.TransformerEncoderLayer)
    ours = convert.encoder(layer, ops=ops)
    before = {name: t.clone() for name, t in ours.state_dict().items()}
    nn.init.zeros_(layer.linear1.weight)
    assert all(torch.equal(t, before[name]) for name, t in ours.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "dropout": 0.3},
        {"bias": False, "batch_first": True},
        {"num_layers": 2, "bidirectional": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_equal_those_of_torch(kind, options, ops):
    theirs = kind(7, 5, **options).to(exact()).eval()
    to_ours = getattr(convert, kind.__name__.lower())
    ours, x = to_ours(theirs, ops=ops), torch.randn(6, 3, 7, dtype=exact())
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_projected_lstm_equals_torch(bidirectional, ops):
    theirs = nn.LSTM(7, 5, 2, proj_size=3, bidirectional=bidirectional).to(exact()).eval()
    ours, x = convert.lstm(theirs, ops=ops), torch.randn(6, 3, 7, dtype=exact())
    torch.testing.assert_close(ours(x), theirs(x))


def test_rnn_with_relu_equals_torch(ops):
    theirs = nn.RNN(7, 5, nonlinearity="relu").to(exact()).eval()
    ours, x = convert.rnn(theirs, ops=ops), torch.randn(6, 3, 7, dtype=exact())
    torch.testing.assert_close(ours(x), theirs(x))


def test_dropouts_are_those_of_torch(ops):
    theirs = nn.TransformerDecoderLayer(E, N, 20, 0.1)
    theirs.dropout.p = 0.2
    theirs.self_attn.dropout = theirs.multihead_attn.dropout = 0.3
    ours = convert.decoder(theirs, ops=ops)
    (layer,) = ours.layers
    assert ours.training
    assert layer.norm2.dropout == layer.norm3.dropout == 0.1
    assert layer.feed_forward.dropout == 0.2
    assert layer.self_attn.dropout == layer.multihead_attn.dropout == 0.3
    assert convert.attention(theirs.self_attn, ops=ops).dropout == 0.3


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_drop_each_step_as_torchs(kind, ops):
    ours = getattr(convert, kind.__name__.lower())(kind(7, 5, 2, dropout=0.3), ops=ops)
    assert ours.dropout == 0.3
    assert type(ours.layer_dropout) is Dropout


def converters():
    return {
        "lstm": (convert.lstm, nn.LSTM(7, 5), "weight_hh_l0"),
        "gru": (convert.gru, nn.GRU(7, 5), "weight_hh_l0"),
        "rnn": (convert.rnn, nn.RNN(7, 5), "weight_hh_l0"),
        "attention": (convert.attention, nn.MultiheadAttention(E, N), "in_proj_weight"),
        "encoder": (convert.encoder, nn.TransformerEncoderLayer(E, N, 20), "norm1.weight"),
        "decoder": (convert.decoder, nn.TransformerDecoderLayer(E, N, 20), "norm1.weight"),
    }


@pytest.mark.parametrize("name", converters())
def test_frozen_weights_stay_frozen(name):
    to_ours, theirs, weight = converters()[name]
    theirs.get_parameter(weight).requires_grad_(False)
    parameters = dict(to_ours(theirs).named_parameters())
    assert [p for p in parameters if not parameters[p].requires_grad] == [
        p for p in parameters if p.endswith(weight)
    ]


@pytest.mark.parametrize("name", converters())
def test_parametrized_modules_are_refused(name):
    to_ours, theirs, weight = converters()[name]
    *owner, weight = weight.rsplit(".", 1)
    parametrizations.weight_norm(theirs.get_submodule("".join(owner)), weight)
    with pytest.raises(ValueError, match=rf"^convert: .*must be removed first, got .*{weight}"):
        to_ours(theirs)


class AwdLstm(nn.Module):
    """A model with the parameter names of AWD-LSTM's RNNModel.

    Each layer is an LSTM of its own, inside a WeightDrop, which renames W_hh to weight_hh_l0_raw.
    """

    def __init__(self, hidden, tied, weight_drop):
        super().__init__()
        sizes = [E, *([hidden] * 2), E if tied else hidden]
        self.encoder, self.decoder = nn.Embedding(V, E), nn.Linear(sizes[-1], V)
        self.rnns = nn.ModuleList(nn.LSTM(X, H) for X, H in itertools.pairwise(sizes))
        if tied:
            self.decoder.weight = self.encoder.weight
        self.weight_drop = weight_drop

    def forward(self, ids):
        x = self.encoder(ids)
        for rnn in self.rnns:
            x = rnn(x)[0]
        return self.decoder(x)

    def checkpoint(self, copies=False):
        state = {}
        for name, t in self.state_dict().items():
            if self.weight_drop and name.startswith("rnns."):
                first, layer, rest = name.split(".")
                name = f"{first}.{layer}.module.{rest}"
                if copies and rest == "weight_hh_l0":
                    state[name] = torch.zeros_like(t)
                name += "_raw" if rest == "weight_hh_l0" else ""
            state[name] = t
        return state


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("weight_drop", "copies"), [(True, False), (True, True), (False, False)])
def test_awd_lstm_checkpoint(tied, weight_drop, copies, ops):
    theirs, ids = AwdLstm(9, tied, weight_drop).to(exact()).eval(), torch.arange(3 * B).view(3, B)
    ours = convert.awd_lstm(
        theirs.checkpoint(copies), ops=ops, dropout=0.25, weight_drop=0.5
    ).eval()
    torch.testing.assert_close(ours.logits(ours(ids)[0]), theirs(ids))
    assert ours.settings.tied == tied
    assert ours.settings.hidden == (9, 9, E if tied else 9)
    assert ours.recurrent.weight_drop == 0.5


def test_the_loss_of_awd_lstm_with_splits_is_loaded_separately(ops):
    model = convert.awd_lstm(AwdLstm(9, True, True).checkpoint(), ops=ops, splits=(10,))
    model.loss.load_state_dict({"tail_vectors": torch.ones(1, E), "tail_bias": torch.ones(1)})
    assert model.loss.tombstones.all()


def changed(build, change):
    layer = build(E, N, 20, 0.3)
    change(layer)
    return layer


# What converted layers cannot represent: (kind of layer, change, message).
DIFFERENT_SUBLAYERS = {
    "norm2.eps": ("Encoder", lambda m: setattr(m.norm2, "eps", 0.1), "norm2.eps must equal norm1"),
    "norm3.eps": ("Decoder", lambda m: setattr(m.norm3, "eps", 0.1), "norm3.eps must equal norm1"),
    "dropout2": ("Encoder", lambda m: setattr(m.dropout2, "p", 0.1), "dropout2.p must equal"),
    "dropout3": ("Decoder", lambda m: setattr(m.dropout3, "p", 0.1), "dropout3.p must equal"),
    "cross-attention": (
        "Decoder",
        lambda m: setattr(m.multihead_attn, "dropout", 0.1),
        "multihead_attn.dropout must equal self_attn.dropout = 0.3, got 0.1",
    ),
    "heads": (
        "Decoder",
        lambda m: setattr(m, "multihead_attn", nn.MultiheadAttention(E, 2, 0.3)),
        "multihead_attn.num_heads must equal self_attn.num_heads = 3, got 2",
    ),
    "bias_kv": (
        "Encoder",
        lambda m: setattr(m, "self_attn", nn.MultiheadAttention(E, N, add_bias_kv=True)),
        "self_attn must be without add_bias_kv",
    ),
    "zero_attn": (
        "Encoder",
        lambda m: setattr(m, "self_attn", nn.MultiheadAttention(E, N, add_zero_attn=True)),
        "self_attn must be without add_zero_attn",
    ),
    "norm": (
        "Encoder",
        lambda m: setattr(m, "norm2", nn.RMSNorm(E)),
        "norm2 must be a torch.nn.LayerNorm, got RMSNorm",
    ),
    "identity": (
        "Encoder",
        lambda m: setattr(m, "dropout2", nn.Identity()),
        "dropout2 must be a torch.nn.Dropout, got Identity",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT_SUBLAYERS)
def test_sublayers_that_differ_are_refused_by_name(name):
    kind, change, message = DIFFERENT_SUBLAYERS[name]
    layer = changed(getattr(nn, f"Transformer{kind}Layer"), change)
    with pytest.raises(ValueError, match=rf"^convert: layers\[0\].{message}"):
        getattr(convert, kind.lower())(layer)


def test_a_final_norm_with_another_eps_is_refused():
    layer = nn.TransformerEncoderLayer(E, N)
    stack = nn.TransformerEncoder(layer, 2, nn.LayerNorm(E, 0.1), enable_nested_tensor=False)
    with pytest.raises(ValueError, match=r"norm.eps must equal the layers' layer_norm_eps"):
        convert.encoder(stack)


def layers_that_differ():
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, N), 2, enable_nested_tensor=False)
    theirs.layers[1].norm_first = True
    return theirs


def layer_without_affine_norm():
    theirs = nn.TransformerEncoderLayer(E, N)
    theirs.norm2 = nn.LayerNorm(E, elementwise_affine=False)
    return theirs


BAD = {
    "norm without weight": (
        lambda: convert.encoder(layer_without_affine_norm()),
        r"^convert: layers\[0\]\.norm2 must have elementwise_affine=True",
    ),
    "norm without bias": (
        lambda: convert.encoder(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(E, N),
                2,
                norm=nn.LayerNorm(E, bias=False),
                enable_nested_tensor=False,
            )
        ),
        "^convert: norm must have bias=True, as the linear layers, got bias=False",
    ),
    "activation": (
        lambda: convert.encoder(nn.TransformerEncoderLayer(E, N, activation=F.silu)),
        "activation must be relu",
    ),
    "layers": (
        lambda: convert.encoder(layers_that_differ()),
        r"layers\[1\]: prenorm must be that of layers\[0\], False, got True",
    ),
    "qrnn": (
        lambda: convert.awd_lstm({"rnns.0.linear.weight": torch.ones(1)}),
        r"awd_lstm: state must have weight_ih",
    ),
    "no decoder": (
        lambda: convert.awd_lstm(
            {n: t for n, t in AwdLstm(9, True, True).checkpoint().items() if n != "decoder.bias"}
        ),
        r"awd_lstm: state must have decoder\.bias, got encoder\.weight, ",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_modules_that_cannot_be_converted_are_rejected(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_parameters_of_several_dtypes_are_refused():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
    layer.norm1.double()
    with pytest.raises(
        ValueError, match=r"must have one dtype, got torch.float32 and torch.float64"
    ):
        convert.encoder(layer)
