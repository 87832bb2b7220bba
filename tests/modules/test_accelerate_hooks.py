"""Hooks of an accelerated model: those that were there, and those of all modules, are called.

So is what somebody put in the place of a sublayer's forward.
"""

import copy

import fusedseq
import pytest
import torch
from fusedseq.acceleration import torch_modules, transformer_layers
from fusedseq.acceleration.deferred_logits import DeferredLogits
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as all_modules

from tests.modules.test_accelerate import MODELS, E, N, first, models, sequence

pytestmark = pytest.mark.usefixtures("in_exact_dtype")


def names_of(model):
    return {module: name for name, module in model.named_modules()}


def record_backward(model, modules):
    """Adds both hooks of a backward to the modules; returns the list of what they are given."""
    seen, names = [], names_of(model)

    def before(module, dy):
        seen.append((names[module], "before", *(t for t in dy if t is not None)))

    def after(module, dx, dy):
        given = (t for t in (*dx, *dy) if t is not None)
        seen.append((names[module], "after", *given))

    for module in modules:
        module.register_full_backward_pre_hook(before)
        module.register_full_backward_hook(after)
    return seen


def backward(model, given):
    """Returns the gradients of the parameters, after a backward to the inputs too."""
    model.zero_grad()
    y = first(model(*given))
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [p.grad for p in model.parameters()]


def in_order(seen):
    """Sorted by names: backward visits branches of a graph in an order that may differ."""
    return sorted(seen, key=lambda line: line[:2])


@models
@pytest.mark.parametrize("where", ["the model", "every module"])
def test_backward_hooks_get_the_gradients_that_torch_gives_them(build, inputs, where):
    model, given = build().eval(), inputs()
    given = tuple(x.requires_grad_() if x.is_floating_point() else x for x in given)
    other = copy.deepcopy(model)
    found = []
    for m in (model, other):
        found.append(record_backward(m, [m] if where == "the model" else [*m.modules()]))
    fusedseq.accelerate(other)
    torch.testing.assert_close(backward(other, given), backward(model, given))
    expected, seen = map(in_order, found)
    assert {("", "before"), ("", "after")} <= {line[:2] for line in expected}
    assert [line[:2] for line in seen] == [line[:2] for line in expected]
    for line, wanted in zip(seen, expected, strict=True):
        torch.testing.assert_close(line[2:], wanted[2:])


def test_a_backward_hook_that_changes_a_gradient_changes_it_in_an_accelerated_model():
    model, x = nn.LSTM(E, 7), sequence().requires_grad_()
    model.register_full_backward_hook(lambda module, dx, dy: (3 * dx[0], *dx[1:]))
    plain = torch.autograd.grad(first(model(x)).sum(), x)
    fusedseq.accelerate(model)
    assert isinstance(model, torch_modules.LSTM)
    torch.testing.assert_close(torch.autograd.grad(first(model(x)).sum(), x), plain)


@pytest.mark.parametrize("way", ["forward", "pre", "backward", "backward pre"])
@pytest.mark.parametrize("name", ["encoder", "decoder", "transformer", "linear", "attention"])
def test_hooks_of_all_modules_are_called_for_the_modules_that_torch_calls(name, way):
    """Also those that a fused layer does not call: it calls torch's forward while there are any."""
    build, inputs = MODELS[name]
    model, given = build().eval(), inputs()
    given = tuple(x.requires_grad_() for x in given)
    other = copy.deepcopy(model)
    fusedseq.accelerate(other)
    register = {
        "forward": all_modules.register_module_forward_hook,
        "pre": all_modules.register_module_forward_pre_hook,
        "backward": all_modules.register_module_full_backward_hook,
        "backward pre": all_modules.register_module_full_backward_pre_hook,
    }[way]
    called = []
    for m in (model, other):
        names = names_of(m)
        seen = []
        handle = register(lambda module, *_, seen=seen, names=names: seen.append(names[module]))
        try:
            backward(m, given)
        finally:
            handle.remove()
        called.append(sorted(seen))
    assert called[0]  # so that the comparison is of something
    assert called[1] == called[0]


REPLACED = {
    "linear1": lambda layer: setattr(
        layer.linear1, "forward", lambda x: torch.cat([x, x[..., :8]], -1)
    ),
    "norm1": lambda layer: setattr(layer.norm1, "forward", torch.sin),
    "dropout1": lambda layer: setattr(layer.dropout1, "forward", torch.cos),
    "self_attn": lambda layer: setattr(layer.self_attn, "forward", lambda x, *_, **__: (x, None)),
    "_sa_block": lambda layer: setattr(layer, "_sa_block", lambda x, *_, **__: x),
    "_mha_block": lambda layer: setattr(layer, "_mha_block", lambda x, *_, **__: x),
    "_ff_block": lambda layer: setattr(layer, "_ff_block", torch.sin),
    "activation's forward": lambda layer: setattr(layer.activation, "forward", torch.sin),
    "activation": lambda layer: setattr(layer, "activation", F.silu),
}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_what_was_replaced_in_an_object_of_a_layer_is_called(kind, name, before):
    """Before or after accelerate, as in torch's own layer."""
    is_module = name == "activation's forward"
    layer, other = (kind(E, N, 20, activation=nn.ReLU() if is_module else F.relu) for _ in "12")
    other.load_state_dict(layer.eval().state_dict())
    other.eval()
    given = (sequence(),) * (1 if kind is nn.TransformerEncoderLayer else 2)
    plain = layer(*given)
    REPLACED[name](layer)
    expected = layer(*given)
    assert (name == "_mha_block" and len(given) == 1) or not torch.equal(expected, plain)
    if before:
        REPLACED[name](other)
    fusedseq.accelerate(other)
    if not before:
        REPLACED[name](other)
    torch.testing.assert_close(other(*given), expected)


def test_a_subclass_of_an_activation_is_not_taken_for_it():
    class Halved(nn.GELU):
        def forward(self, input):
            return super().forward(input) / 2

    layer = nn.TransformerEncoderLayer(E, N, 20, activation=Halved()).eval()
    x = sequence()
    expected = layer(x)
    assert "activation" in fusedseq.accelerate(layer).left[0].reason
    torch.testing.assert_close(layer(x), expected)


def test_a_fused_layer_is_fused_again_after_the_hooks_of_all_modules_are_gone():
    layer = nn.TransformerEncoderLayer(E, N, 20)
    fusedseq.accelerate(layer)
    handle = all_modules.register_module_forward_hook(lambda *_: None)
    assert not transformer_layers.is_plain(layer)
    handle.remove()
    assert transformer_layers.is_plain(layer)


@models
def test_hooks_of_the_state_dict_are_called(build, inputs):
    """Of every module, in torch's order, when a state dict is made and when it is loaded."""
    model = build()
    other = copy.deepcopy(model)
    calls = []
    for m in (model, other):
        seen = []
        for name, module in m.named_modules():
            module.register_state_dict_pre_hook(
                lambda *_, n=name, seen=seen: seen.append((n, "before save"))
            )
            module.register_state_dict_post_hook(
                lambda *_, n=name, seen=seen: seen.append((n, "after save"))
            )
            module.register_load_state_dict_pre_hook(
                lambda *_, n=name, seen=seen: seen.append((n, "before load"))
            )
            module.register_load_state_dict_post_hook(
                lambda *_, n=name, seen=seen: seen.append((n, "after load"))
            )
        calls.append(seen)
    report = fusedseq.accelerate(other)
    assert report.replaced
    for m in (model, other):
        m.load_state_dict(m.state_dict())
    assert calls[1] == calls[0]
    assert {line[1] for line in calls[0]} == {
        "before save",
        "after save",
        "before load",
        "after load",
    }


def deferred():
    model = nn.Sequential(nn.Embedding(9, E), nn.Linear(E, 9))
    return model, torch.arange(8).view(2, 4)


def step(model, ids):
    logits = model(ids)
    loss = F.cross_entropy(logits.view(-1, 9), ids.view(-1))
    return logits, (loss, *torch.autograd.grad(loss, [*model.parameters()]))


@pytest.mark.parametrize("where", ["the model", "the output layer", "all modules"])
def test_backward_hooks_see_the_gradient_of_deferred_logits(where):
    model, ids = deferred()
    other = copy.deepcopy(model)
    fusedseq.accelerate(other, loss=nn.CrossEntropyLoss())
    assert isinstance(step(other, ids)[0], DeferredLogits)
    results = []
    for m in (model, other):
        seen = []

        def hook(module, dx, dy, seen=seen, output=m[1]):
            if module is output or where == "the model":
                seen.append(dy[0])

        register = {
            "the model": m.register_full_backward_hook,
            "the output layer": m[1].register_full_backward_hook,
            "all modules": all_modules.register_module_full_backward_hook,
        }[where]
        handle = register(hook)
        try:
            results.append((step(m, ids)[1], seen))
        finally:
            handle.remove()
    assert len(results[0][1]) == 1
    torch.testing.assert_close(results[1], results[0])
