"""Dropout of an accelerated model in training: the probability, the scale and the masks of torch's.

The weights are chosen so that an element of the output is zero where the mask drops one.
"""

import fusedseq
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("in_exact_dtype")
P, E, N = 0.25, 64, 16
CANDIDATE = {nn.LSTM: 2, nn.GRU: 2, nn.RNN: 0}  # the place of the candidate's rows among the gates


def before_and_after(model):
    """Yields torch's model, for which the test must hold too, and then the accelerated one."""
    yield model
    assert fusedseq.accelerate(model).replaced
    yield model


def set_to_zero(model):
    """Sets all parameters to 0, but the weights of a LayerNorm to 1."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_scale = isinstance(module, nn.LayerNorm) and name == "weight"
            nn.init.constant_(parameter, 1.0 if is_scale else 0.0)


def pass_through(kind):
    """Returns two layers without recurrence: the first one's output is the same number everywhere,
    and the second is a function of each element alone, which is zero for zero."""
    model, H = kind(3, E, 2, dropout=P), E
    set_to_zero(model)
    candidate = slice(CANDIDATE[kind] * H, (CANDIDATE[kind] + 1) * H)
    with torch.no_grad():
        model.bias_ih_l0[candidate] = 1.0
        model.weight_ih_l1[candidate] = torch.eye(H)
        if kind is not nn.RNN:  # the forget gate of an LSTM, the update gate of a GRU
            model.bias_ih_l0[H : 2 * H] = model.bias_ih_l1[H : 2 * H] = -100.0
    return model


@pytest.mark.parametrize("kind", CANDIDATE)
def test_recurrent_layers_drop_each_step_between_them_with_torchs_strength(kind):
    model, x = pass_through(kind), torch.zeros(4, 200, 3)
    scaled = pass_through(kind).eval()
    with torch.no_grad():
        scaled.weight_ih_l1 /= 1 - P
        expected = scaled(x)[0]
        assert (expected > 0.01).all()
    for current in before_and_after(model):
        y = current.train()(x)[0]
        dropped = y.abs() < 1e-9
        # 51,200 elements: the standard deviation of the fraction is 0.0019.
        assert dropped.double().mean().item() == pytest.approx(P, abs=0.01)
        torch.testing.assert_close(y[~dropped], expected[~dropped])
        assert (dropped[0] != dropped[1]).any()
        assert ((current(x)[0].abs() < 1e-9) != dropped).any()
        assert (current.eval()(x)[0] > 0.01).all()


def test_attention_drops_each_probability_with_torchs_strength():
    """Of two keys that a query sees alike, with values of 1, the result is the number of kept ones
    times 1 / 2 / (1 - p)."""
    model = nn.MultiheadAttention(E, N, P)
    set_to_zero(model)
    with torch.no_grad():
        model.in_proj_bias[2 * E :] = 1.0
        model.out_proj.weight.copy_(torch.eye(E))
    query, key = torch.randn(50, 64, E), torch.randn(2, 64, E)
    for current in before_and_after(model):
        y = current(query, key, key, need_weights=False)[0].unflatten(-1, (N, E // N))
        kept = 2 * (1 - P) * y
        torch.testing.assert_close(kept, kept[..., :1].round().expand_as(kept))
        share = kept[..., 0].round().long().flatten().bincount(minlength=3) / (50 * 64 * N)
        # 51,200 numbers: the standard deviation of a fraction is at most 0.0022.
        wanted = torch.tensor([P**2, 2 * P * (1 - P), (1 - P) ** 2])
        torch.testing.assert_close(share.to(wanted), wanted, rtol=0, atol=0.011)
        other = current(query, key, key, need_weights=False)[0].unflatten(-1, (N, E // N))
        assert (other != y).any()


LAYERS = {
    "encoder": (nn.TransformerEncoderLayer, ("self_attn", "dropout1", "dropout", "dropout2")),
    "decoder": (
        nn.TransformerDecoderLayer,
        ("self_attn", "dropout1", "multihead_attn", "dropout2", "dropout", "dropout3"),
    ),
}
PLACES = [(kind, place) for kind, (_, places) in LAYERS.items() for place in places]


def with_one_dropout(kind, place, norm_first):
    """Returns a layer whose result for zeros is dropped ones, before the norm that may follow.

    place: the only sublayer that drops
    """
    layer = LAYERS[kind][0](E, N, E, P, norm_first=norm_first)
    set_to_zero(layer)
    for name, module in layer.named_modules():
        if isinstance(module, nn.Dropout) and name != place:
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention) and name != place:
            module.dropout = 0.0
    attentions = [m for m in layer.children() if isinstance(m, nn.MultiheadAttention)]
    with torch.no_grad():
        if place.endswith("attn"):  # one key, whose value is 1
            layer.get_submodule(place).in_proj_bias[2 * E :] = 1.0
            layer.get_submodule(place).out_proj.weight.copy_(torch.eye(E))
        elif place == "dropout":
            layer.linear1.bias.fill_(1.0)
            layer.linear2.weight.copy_(torch.eye(E))
        elif int(place[-1]) <= len(attentions):
            attentions[int(place[-1]) - 1].out_proj.bias.fill_(1.0)
        else:
            layer.linear2.bias.fill_(1.0)
    return layer


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_each_dropout_of_a_transformer_layer_has_torchs_strength(kind, place, norm_first):
    """A LayerNorm makes dropped elements of a row negative, and kept ones at least about 0."""
    layer = with_one_dropout(kind, place, norm_first)
    given = [torch.zeros(1, 3200, E)] * (2 if kind == "decoder" else 1)
    for current in before_and_after(layer):
        y = current.train()(*given)
        dropped = y < (0.5 if norm_first else -1e-3)
        # At least 51,200 masks: the standard deviation of the fraction is at most 0.0019.
        assert dropped.double().mean().item() == pytest.approx(P, abs=0.01)
        if norm_first:
            expected = torch.where(dropped, 0.0, 1 / (1 - P)).to(y)
            torch.testing.assert_close(y, expected)
            assert (current.eval()(*given) == 1).all()
