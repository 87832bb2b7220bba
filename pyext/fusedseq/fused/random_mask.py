"""What `dropout`, `locked_dropout` and `weight_drop` have in common: each multiplies its first
argument by a random mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fusedseq.fused import autograd
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.schema import Gradients, Named, Schema
from fusedseq.fused.through_oracle import call_reference


def register(op: str, oracle: Callable[..., Tensor]) -> None:
    """Registers the shapes and the gradient of such an operator.

    The operator is linear in its first argument, so its gradient is the operator itself, which can
    be differentiated again.
    oracle: the function of `fusedseq.reference`
    """
    first = Schema(op).inputs[0]

    def fake(named: Named) -> Tensor:
        return torch.empty_like(named[first], memory_format=torch.contiguous_format)

    def gradient(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
        return {first: autograd.call_by_name(op, named | {first: grads["y"]})}

    autograd.register(
        op,
        fake,
        Gradient(
            results=("y",),
            oracle=lambda named: call_reference(oracle, named),
            saves=("seed",),
            compute=gradient,
            is_linear=True,
        ),
    )
