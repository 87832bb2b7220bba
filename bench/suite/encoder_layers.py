"""Whole Transformer encoder layers: torch's, and the same layer converted to fused operators.

The weights are arguments of the call, so that its gradients are computed as those of an operator.
"""

from dataclasses import dataclass
from functools import partial

import torch
from fusedseq import testing
from fusedseq.models import convert
from torch import nn
from torch.func import functional_call

from bench.suite.case import BenchmarkCase

HEADS, DROPOUT = 8, 0.1
# Of the norm of a result or gradient. In bf16, torch's layer and ours both differ by 3 % from fp64.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def torch_layer(E):
    return nn.TransformerEncoderLayer(E, HEADS, 4 * E, DROPOUT, batch_first=True)


def inputs(B, L, E, randn):
    """Returns x (B, L, E) and the layer's parameters, as small as those of a new layer."""
    shapes = [p.shape for p in torch_layer(E).parameters()]
    return (randn(B, L, E), *(E**-0.5 * randn(*shape) for shape in shapes)), {}


def with_parameters(layer, names, x, *parameters):
    return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))


def layers(E, parameters, training=True):
    """Returns {provider: function of x and the parameters of torch's layer}."""
    theirs = torch_layer(E).train(training)
    with torch.no_grad():
        for mine, given in zip(theirs.parameters(), parameters, strict=True):
            mine.copy_(given)
    ours = convert.encoder(theirs).train(training)

    # The converted parameters are found by their values, which are random and so unlike.
    def name_in_ours(parameter):
        (name,) = [
            name
            for name, own in ours.named_parameters()
            if own.shape == parameter.shape and torch.equal(own, parameter)
        ]
        return name

    names = [name_in_ours(parameter) for parameter in theirs.parameters()]
    return {
        "fused": partial(with_parameters, ours, names),
        "torch": partial(with_parameters, theirs, [name for name, _ in theirs.named_parameters()]),
    }


@dataclass(frozen=True)
class EncoderLayerCase(BenchmarkCase):
    """A training step of one layer, forward and backward, with dropout."""

    width: int = 0

    def providers(self, full):
        made = {}

        def call(provider, x, *parameters):
            if not made:
                made.update(layers(self.width, [p.detach() for p in parameters]))
            return made[provider](x, *parameters)

        return {name: partial(call, name) for name in ("fused", "torch")}


def check(case, args):
    """Asserts that both layers agree in eval mode, with their gradients.

    Norms are compared, because a rounding error at the kink of ReLU changes single elements.
    Returns the largest error as a fraction of the tolerance.
    """
    given = [t.detach().requires_grad_() for t in args]
    found = {}
    for name, layer in layers(case.width, [p.detach() for p in given[1:]], training=False).items():
        out = layer(*given)
        found[name] = (out, *torch.autograd.grad(out, given, testing.cotangents([out])))
    errors = [
        ((ours - theirs).norm() / theirs.norm() / TOLERANCE[case.dtype]).item()
        for ours, theirs in zip(found["fused"], found["torch"], strict=True)
    ]
    worst = torch.tensor(errors).max().item()  # which is NaN if one is
    assert worst <= 1, f"{case.name}: the layers differ by {worst:.3g} tolerances"
    return worst
