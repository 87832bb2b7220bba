"""accelerate on nn.TransformerEncoder, which nests a padded batch in eval mode."""

import copy

import fusedseq
import pytest
import torch
from torch import nn

E, N, L = 12, 4, 5
LENGTHS = (5, 2, 4, 1)


@pytest.fixture(autouse=True)
def _in_fp64():
    """Without the fixture `in_exact_dtype`: where a default device is set, torch nests nothing."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(E, N, 20, 0.3, batch_first=True, **options)


def encoder(has_norm=False, **options):
    norm = nn.LayerNorm(E) if has_norm else None
    if norm is not None:
        nn.init.normal_(norm.bias)
    return nn.TransformerEncoder(encoder_layer(**options), 2, norm).eval()


def padded(lengths=LENGTHS):
    """Returns x (B, L, E) and where it is padding."""
    x = torch.randn(len(lengths), L, E)
    return x, torch.arange(L) >= torch.tensor(lengths)[:, None]


def rows_of_norms(monkeypatch):
    """Returns a list that gets the shape of x in each call of residual_layer_norm."""
    shapes, operator = [], fusedseq.fused.residual_layer_norm

    def recorded(x, *args, **kwargs):
        shapes.append(tuple(x.shape))
        return operator(x, *args, **kwargs)

    monkeypatch.setattr(fusedseq.fused, "residual_layer_norm", recorded)
    return shapes


@pytest.mark.parametrize("way", ["no_grad", "inference", "frozen"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_the_operators_compute_the_rows_that_are_no_padding(monkeypatch, has_norm, activation, way):
    """torch's result is zero at the padding, before the norm of the whole encoder."""
    model, (x, mask) = encoder(has_norm, activation=activation), padded()
    if way == "frozen":
        model.requires_grad_(False)
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with modes.get(way, torch.enable_grad)():
        expected = model(x, src_key_padding_mask=mask)
        fusedseq.accelerate(model)
        shapes = rows_of_norms(monkeypatch)
        found = model(x, src_key_padding_mask=mask)
    assert shapes == [(sum(LENGTHS), E)] * 4
    torch.testing.assert_close(found, expected)
    zeros = torch.zeros_like(expected[mask])
    torch.testing.assert_close(found[mask], zeros if model.norm is None else model.norm(zeros))


def test_a_sequence_without_a_token_is_zero():
    model, (x, mask) = encoder(), padded((5, 0, 3))
    fusedseq.accelerate(model)
    with torch.no_grad():
        found = model(x, src_key_padding_mask=mask)
        alone = model(x[2:, :3])
    assert (found[mask] == 0).all()
    torch.testing.assert_close(found[2:, :3], alone)


@pytest.mark.parametrize("aligned", ["left", "right"])
def test_results_and_gradients_of_the_padded_batch_are_torchs(aligned):
    """With a gradient nothing is nested, and values at the padding are computed as by torch."""
    model, (x, mask) = encoder(), padded()
    mask = mask.flip(1) if aligned == "right" else mask
    results = []
    for _ in range(2):
        y = model(x, src_key_padding_mask=mask)
        weight = torch.linspace(-1, 1, y.numel()).view_as(y)
        results.append((y, torch.autograd.grad((y * weight).sum(), [*model.parameters()])))
        with torch.no_grad():
            results[-1] += (model(x, src_key_padding_mask=mask),)
        fusedseq.accelerate(model)
    torch.testing.assert_close(results[1], results[0])


def test_a_hook_on_a_sublayer_runs_as_in_torchs_layer():
    model, (x, mask) = encoder(), padded()
    other = copy.deepcopy(model)
    fusedseq.accelerate(other)
    found, called = [], []
    for m in (model, other):
        m.layers[0].linear1.register_forward_hook(lambda *_: called.append(1))
        with torch.no_grad():
            found.append(m(x, src_key_padding_mask=mask))
    torch.testing.assert_close(found[1], found[0])
    assert len(called) == 2


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer_returns_a_nested_tensor_for_one(monkeypatch, norm_first):
    layer = encoder_layer(norm_first=norm_first).eval()
    x = torch.nested.nested_tensor([torch.randn(length, E) for length in LENGTHS])
    with torch.no_grad():
        expected = layer(x)
        fusedseq.accelerate(layer)
        shapes = rows_of_norms(monkeypatch)
        found = layer(x)
    assert shapes[0] == (sum(LENGTHS), E)
    for y, wanted in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(y, wanted)
