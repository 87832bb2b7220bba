"""What an operator's schema says about it, by name.

The C++ declaration of an operator (csrc/ops/declaration.h) is the only list of its arguments and
results. Everything that Python has to know about them is read from the registered schemas here, by
these rules for `<op>_backward`:

- an argument `d<output>` is the gradient of that output of `<op>`;
- an argument with the name of an input or of an output of `<op>` is that value;
- the argument `needs` is an integer whose bit i is set where the i-th result is required;
- the argument `outputs` is the list of all outputs of `<op>`;
- a result `d<input>` is the gradient of that input.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Named = dict[str, Any]  # the arguments of a call, or its results, by name
Gradients = dict[str, Tensor | None]  # by the name of the input or of the output


def overload(op: str) -> Any:
    """The registered operator `fusedseq::<op>`, a torch._ops.OpOverload."""
    return getattr(torch.ops.fusedseq, op).default


def is_tensor(argument: Any) -> bool:
    """Whether an argument of a schema is a tensor or an optional tensor."""
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


@dataclass(frozen=True)
class Schema:
    """The arguments and results of a registered operator, in order."""

    op: str

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(a.name for a in overload(self.op)._schema.arguments)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The inputs that are tensors or optional tensors."""
        return tuple(a.name for a in overload(self.op)._schema.arguments if is_tensor(a))

    @cached_property
    def required_tensors(self) -> frozenset[str]:
        """The inputs that are tensors and may not be None."""
        arguments = overload(self.op)._schema.arguments
        return frozenset(a.name for a in arguments if str(a.type) == "Tensor")

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(r.name for r in overload(self.op)._schema.returns)


def gradient_of(name: str, names: Sequence[str]) -> str | None:
    """Returns "W_ih" for "dW_ih" if that is among `names`, else None."""
    return name[1:] if name.startswith("d") and name[1:] in names else None


@dataclass(frozen=True)
class BackwardSchema:
    """How the arguments and results of a backward operator relate to those of its forward."""

    forward: Schema
    backward: Schema

    @cached_property
    def gradients(self) -> tuple[str, ...]:
        """The inputs of the forward whose gradients the backward returns, in its order."""
        found = [gradient_of(name, self.forward.inputs) for name in self.backward.outputs]
        assert None not in found, f"{self.backward.op} returns {self.backward.outputs}"
        return tuple(name for name in found if name is not None)

    @cached_property
    def output_gradients(self) -> dict[str, str]:
        """{argument of the backward: output of the forward that it is the gradient of}"""
        values = {*self.forward.inputs, *self.forward.outputs}
        found = {
            name: gradient_of(name, self.forward.outputs)
            for name in self.backward.inputs
            if name not in values
        }
        return {name: output for name, output in found.items() if output is not None}

    @cached_property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """Where each argument of the backward comes from: (kind, name).

        The kind is "value" for an input or output of the forward or a derived value, "needs",
        "outputs", or "gradient" or "required gradient" for the gradient of the output `name`.
        """
        found = []
        for name in self.backward.inputs:
            if name in ("needs", "outputs"):
                found.append((name, name))
            elif name in self.output_gradients:
                is_required = name in self.backward.required_tensors
                kind = "required gradient" if is_required else "gradient"
                found.append((kind, self.output_gradients[name]))
            else:
                found.append(("value", name))
        return tuple(found)

    def needs(self, needed: Container[str]) -> int:
        """Returns the argument `needs`: bit i is set where the i-th of `gradients` is needed."""
        return sum(1 << i for i, name in enumerate(self.gradients) if name in needed)
