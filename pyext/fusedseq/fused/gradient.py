"""The gradients of an operator: what of a call is saved, and which kernel or oracle computes its
gradients.

Arguments, saved tensors and gradients are connected by the names in the operators' schemas: see
schema.py. An operator adds to that only what its schema cannot say, as a `Gradient`.

Kernels compute the first gradients, in reverse mode. A backward that is recorded itself gets its
derivatives from the oracle, and so does a backward inside of a transform that kernels do not have:
see through_oracle.py. Inside of vmap the kernels of some operators run in a loop: `Gradient.loops`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fusedseq.fused.schema import BackwardSchema, Gradients, Named, Schema, overload
from fusedseq.fused.through_oracle import pull_back, through_oracle
from fusedseq.fused.transforms import is_transformed, needs_oracle, one_by_one, only_batches

SHAPES = "shapes of results"  # an entry among the saved values: {output: (shape, dtype, device)}


@dataclass(frozen=True)
class Gradient:
    """How the gradients of an operator are computed.

    results: the outputs that have a gradient
    oracle: (inputs by name) -> the results in plain PyTorch, in their order, and after them further
        outputs, in their order
    backwards: the operators that compute the gradients; by default the first one is called by its
        schema
    saves: the tensor inputs that are saved for backward; None for all, as an oracle needs them
    unsaved: (inputs by name) -> names of inputs and outputs that this call need not save
    derived: (inputs by name) -> further values, not tensors, that backward needs by name
    compute: (saved values by name, gradients of the results, needed inputs) -> gradients of the
        inputs, in place of the default
    higher: the same for a backward that is recorded itself, in place of the oracle
    loops: whether torch.func.vmap calls the kernels for one element after the other and not the
        oracle, which takes longer where it is itself a loop over time steps
    is_linear: whether the gradients that `compute` returns are recorded by autograd themselves, so
        that higher derivatives need no oracle
    """

    results: tuple[str, ...]
    oracle: Callable[[Named], Any]
    backwards: tuple[str, ...] = ()
    saves: tuple[str, ...] | None = None
    unsaved: Callable[[Named], Iterable[str]] | None = None
    derived: Callable[[Named], Named] | None = None
    compute: Callable[[Named, Gradients, frozenset[str]], Gradients] | None = None
    higher: Callable[[Named, Gradients, frozenset[str]], Gradients] | None = None
    loops: bool = False
    is_linear: bool = False


class Rule:
    """A `Gradient` with all names of the operator's schema resolved to positions, because setup and
    backward run in every call."""

    def __init__(self, op: str, gradient: Gradient):
        self.op, self.gradient, self.schema = op, gradient, Schema(op)
        self.backwards = {
            name: BackwardSchema(self.schema, Schema(name)) for name in gradient.backwards
        }
        inputs, outputs = self.schema.inputs, self.schema.outputs
        saves = self.schema.tensors if gradient.saves is None else gradient.saves
        read = {name for backward in self.backwards.values() for name in backward.backward.inputs}
        saved_outputs = [name for name in outputs if name in read or "outputs" in read]
        self.saved = (*saves, *saved_outputs)
        self.saved_inputs = [inputs.index(name) for name in saves]
        self.saved_outputs = [outputs.index(name) for name in saved_outputs]
        self.settings = [name for name in inputs if name not in self.schema.tensors]
        self.setting_positions = [inputs.index(name) for name in self.settings]
        self.constants = [i for i, name in enumerate(outputs) if name not in gradient.results]
        # The results whose gradient a backward requires although autograd may not have one: zeros
        # of the result's shape stand in for it.
        required = {
            output
            for backward in self.backwards.values()
            for name, output in backward.output_gradients.items()
            if name in backward.backward.required_tensors
        }
        may_lack = len(gradient.results) > 1
        self.zeroed = [(n, outputs.index(n)) for n in outputs if may_lack and n in required]

    def setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """`setup_context` of torch.library.register_autograd."""
        outputs = output if len(self.schema.outputs) > 1 else (output,)
        ctx.set_materialize_grads(False)
        if self.constants:
            ctx.mark_non_differentiable(*[outputs[i] for i in self.constants])
        tensors = [inputs[i] for i in self.saved_inputs] + [outputs[i] for i in self.saved_outputs]
        if self.gradient.unsaved:
            unsaved = self.gradient.unsaved(dict(zip(self.schema.inputs, inputs, strict=True)))
            pairs = zip(self.saved, tensors, strict=True)
            tensors = [None if name in unsaved else t for name, t in pairs]
        ctx.save_for_backward(*tensors)
        ctx.settings = {
            name: inputs[i] for name, i in zip(self.settings, self.setting_positions, strict=True)
        }
        if self.gradient.derived:
            ctx.settings |= self.gradient.derived(
                dict(zip(self.schema.inputs, inputs, strict=True))
            )
        if self.zeroed:
            ctx.settings[SHAPES] = {
                name: (outputs[i].shape, outputs[i].dtype, outputs[i].device)
                for name, i in self.zeroed
                if outputs[i] is not None
            }

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """`backward` of torch.library.register_autograd and of torch.autograd.Function."""
        inputs, results = self.schema.inputs, self.gradient.results
        of_results = {
            name: g for name, g in zip(self.schema.outputs, grads, strict=False) if name in results
        }
        if all(g is None for g in of_results.values()):
            return (None,) * len(inputs)
        needs = zip(inputs, ctx.needs_input_grad, strict=True)
        needed = frozenset([name for name, need in needs if need])
        named = dict(zip(self.saved, ctx.saved_tensors, strict=True))
        named.update(ctx.settings)
        values = [*named.values(), *of_results.values()]
        in_a_loop = self.gradient.loops and only_batches(values)
        by_oracle = not in_a_loop and needs_oracle(values)
        if self.gradient.is_linear or not (torch.is_grad_enabled() or by_oracle or in_a_loop):
            found = self.compute(named, of_results, needed)
        elif by_oracle:
            found = self.through_oracle(named, of_results, needed)
        else:
            found = self.recorded(named, of_results, needed)
        return tuple([found.get(name) if name in needed else None for name in inputs])

    def by_oracle(self, named: Named) -> Named:
        """The results of the operator in plain PyTorch, by name, and the further outputs that the
        oracle returns.
        """
        results, outputs = self.gradient.results, self.schema.outputs
        order = [*results, *[name for name in outputs if name not in results]]
        return dict(zip(order, tree_flatten(self.gradient.oracle(named))[0], strict=False))

    def compute(self, named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
        """The gradients by kernels; autograd records them only if the operator is linear."""
        if self.gradient.compute:
            return self.gradient.compute(named, grads, needed)
        return call_backward(self.gradient.backwards[0], named, grads, needed)

    def through_oracle(self, named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
        if self.gradient.higher:
            return self.gradient.higher(named, grads, needed)
        return through_oracle(self.gradient.oracle, named, grads, needed)

    def recorded(self, named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
        """The gradients by kernels, recorded so that they can be differentiated again, as with
        create_graph=True and torch.func.grad. The oracle is computed only if they are.
        """
        values = {("value", name): value for name, value in named.items()}
        values |= {("gradient", name): g for name, g in grads.items()}
        order = [name for name in self.schema.inputs if name in needed]
        found = RecordedGradient.apply(  # type: ignore[no-untyped-call]
            self, (*values,), order, *values.values()
        )
        return dict(zip(order, found, strict=True))


class RecordedGradient(torch.autograd.Function):
    """(rule, keys, order, *values) -> the gradients of the inputs named in `order`, by kernels; the
    derivatives of these gradients come from the oracle.

    keys: ("value", name) for the saved values and ("gradient", name) for the gradients of results,
        one for each of `values`
    """

    @staticmethod
    def forward(rule: Rule, keys: Any, order: list[str], *values: Any) -> Any:
        found = rule.compute(*_by_kind(keys, values), frozenset(order))
        return tuple([found.get(name) for name in order])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.keys, ctx.order, *values = inputs
        ctx.save_for_backward(*[v if isinstance(v, Tensor) else None for v in values])
        ctx.others = [None if isinstance(v, Tensor) else v for v in values]

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: Rule, keys: Any, order: list[str], *values: Any) -> Any:
        def of_one(*given: Any) -> Any:
            return RecordedGradient.apply(  # type: ignore[no-untyped-call]
                rule, keys, order, *given
            )

        return one_by_one(of_one, info.batch_size, in_dims[3:], values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        values = [other if t is None else t for t, other in pairs]
        needs = ctx.needs_input_grad[3:]

        def gradients(*given: Tensor) -> list[Tensor]:
            """The gradients that `forward` returned, as a function of the tensors that need one."""
            rest = iter(given)
            all_values = [next(rest) if n else v for n, v in zip(needs, values, strict=True)]
            named, upstream = _by_kind(ctx.keys, all_values)
            found = ctx.rule.through_oracle(named, upstream, frozenset(ctx.order))
            wanted = [name for name, g in zip(ctx.order, grads, strict=True) if g is not None]
            zero = torch.zeros_like
            return [zero(named[n]) if (g := found[n]) is None else g for n in wanted]

        second = pull_back(
            gradients,
            [v for v, need in zip(values, needs, strict=True) if need],
            [g for g in grads if g is not None],
            create_graph=torch.is_grad_enabled(),
        )
        rest = iter(second)
        return None, None, None, *[next(rest) if need else None for need in needs]


def _by_kind(keys: Iterable[tuple[str, str]], values: Iterable[Any]) -> tuple[Named, Gradients]:
    """The saved values and the gradients of the results, by name."""
    found: dict[str, Named] = {"value": {}, "gradient": {}}
    for (kind, name), value in zip(keys, values, strict=True):
        found[kind][name] = value
    return found["value"], found["gradient"]


# Filled by autograd.register and autograd.register_fake.
backwards: dict[str, BackwardSchema] = {}  # backward operator: how it belongs to its forward
overloads: dict[str, Any] = {}  # operator: its OpOverload


def below(op: str, *inputs: Any) -> Any:
    """`torch.ops.fusedseq.<op>(*inputs)` below the dispatcher's autograd keys: not recorded."""
    with torch._C._AutoDispatchBelowAutograd():
        return overloads[op](*inputs)


def call_backward(
    op: str, named: Named, grads: Gradients, needed: frozenset[str], more_needs: int = 0
) -> Gradients:
    """Calls the operator `op` for the gradients of the inputs that are `needed`.

    named: saved inputs, saved outputs and settings of the forward call
    grads: the gradients of its results
    more_needs: bits of the argument `needs` beside those of the gradients
    """
    backward = backwards[op]
    arguments: list[Any] = []
    for kind, name in backward.sources:
        if kind == "value":
            arguments.append(named[name])
        elif kind == "outputs":
            arguments.append([named[output] for output in backward.forward.outputs])
        elif kind == "needs":
            arguments.append(backward.needs(needed) | more_needs)
        else:
            g = grads[name]
            if g is None and kind == "required gradient":
                shape, dtype, device = named[SHAPES][name]
                g = torch.zeros(shape, dtype=dtype, device=device)
            arguments.append(g)
    found = overload(op)(*arguments) if is_transformed() else below(op, *arguments)
    found = found if len(backward.gradients) > 1 else (found,)
    return {name: g for name, g in zip(backward.gradients, found, strict=True) if name in needed}
