"""How every operator is recorded by autograd: fake kernels, first and higher derivatives, forward
mode, the transforms of torch.func, fast paths for small calls.

Arguments, saved tensors and gradients are connected by the names in the operators' schemas: see
schema.py. An operator adds to that only what its schema cannot say, as a `Gradient`.

Kernels compute an operator and its first gradients in reverse mode. Everything else is computed by
the operator's oracle, whose plain PyTorch has every derivative: higher derivatives, forward mode
(torch.func.jvp, jacfwd, torch.autograd.forward_ad), and calls inside of torch.func.vmap.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten

from fusedseq import _load
from fusedseq.fused.schema import BackwardSchema, Named, Schema, overload

Gradients = dict[str, Tensor | None]  # by the name of the input or of the output
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
    is_linear: bool = False


class _Rule:
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
        by_oracle = needs_oracle([*named.values(), *of_results.values()])
        if self.gradient.is_linear or not (torch.is_grad_enabled() or by_oracle):
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
        found = _RecordedGradient.apply(  # type: ignore[no-untyped-call]
            self, (*values,), order, *values.values()
        )
        return dict(zip(order, found, strict=True))


_inputs: dict[str, tuple[str, ...]] = {}  # operator: the names of its inputs
_rules: dict[str, _Rule] = {}
_backwards: dict[str, BackwardSchema] = {}  # backward operator: how it belongs to its forward
_functions: dict[str, type[torch.autograd.Function]] = {}  # operator: what records it in Python
_overloads: dict[str, Any] = {}  # operator: its OpOverload


_library = torch.library.Library("fusedseq", "IMPL")


def register(op: str, fake: Callable[[Named], Any], gradient: Gradient | None = None) -> None:
    """Registers the shapes of an operator's results, and its gradients.

    fake: (inputs by name) -> results on the meta device
    """
    register_fake(op, fake)
    if gradient is None:
        return
    rule = _Rule(op, gradient)
    _library.impl(op, _autograd_kernel(op, rule), "Autograd", with_keyset=True)
    _rules[op] = rule
    _backwards.update(rule.backwards)
    _functions[op] = _function(op, rule)


def _autograd_kernel(op: str, rule: _Rule) -> Callable[..., Any]:
    """The kernel of `torch.ops.fusedseq.<op>` for the dispatcher's autograd keys: that of
    torch.library.register_autograd, which drops tangents and refuses torch.func's transforms, and
    the oracle in their place.
    """
    record = make_autograd_impl(overload(op), Info(rule.backward, rule.setup))

    def kernel(keyset: Any, *inputs: Any) -> Any:
        if not (torch._C._are_functorch_transforms_active() or has_tangents(inputs)):
            return record(keyset, *inputs)
        named = dict(zip(rule.schema.inputs, inputs, strict=True))
        found = rule.by_oracle(named)
        if len(found) < len(rule.schema.outputs):  # tensors that only the backward reads
            saved = below(op, *inputs)
            found = dict(zip(rule.schema.outputs, saved, strict=True)) | found
        outputs = tuple(found[name] for name in rule.schema.outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    return kernel


def register_fake(op: str, fake: Callable[[Named], Any]) -> None:
    names = Schema(op).inputs

    def by_position(*values: Any, **more: Any) -> Any:
        return fake(dict(zip(names, values, strict=False)) | more)

    torch.library.register_fake(f"fusedseq::{op}", by_position)
    _inputs[op] = names
    _overloads[op] = overload(op)


def register_fake_backward(
    op: str, new_gradient: Callable[[Named, str], Tensor] | None = None
) -> None:
    """Registers the shapes of the gradients that `<op>_backward` returns: the needed ones have the
    shapes of their inputs, the others no elements.

    new_gradient: (arguments of the backward by name, name of the input) -> an empty gradient, where
    that is not contiguous or not of the input's dtype
    """
    backward = BackwardSchema(Schema(op), Schema(f"{op}_backward"))

    def fake(named: Named) -> tuple[Tensor, ...]:
        first = named[backward.gradients[0]]
        needs = named.get("needs", -1)
        make = new_gradient or (lambda named, name: first.new_empty(named[name].shape))
        return tuple(
            make(named, name) if needs >> i & 1 else first.new_empty(0)
            for i, name in enumerate(backward.gradients)
        )

    register_fake(f"{op}_backward", fake)


def _function(op: str, rule: _Rule) -> type[torch.autograd.Function]:
    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return below(op, *inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            rule.setup(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return rule.backward(ctx, *grads)

    return Recorded


class _RecordedGradient(torch.autograd.Function):
    """(rule, keys, order, *values) -> the gradients of the inputs named in `order`, by kernels; the
    derivatives of these gradients come from the oracle.

    keys: ("value", name) for the saved values and ("gradient", name) for the gradients of results,
        one for each of `values`
    """

    @staticmethod
    def forward(rule: _Rule, keys: Any, order: list[str], *values: Any) -> Any:
        found = rule.compute(*_by_kind(keys, values), frozenset(order))
        return tuple([found.get(name) for name in order])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.keys, ctx.order, *values = inputs
        ctx.save_for_backward(*[v if isinstance(v, Tensor) else None for v in values])
        ctx.others = [None if isinstance(v, Tensor) else v for v in values]

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


recorder = _load.recorder()  # the module of csrc/python/_autograd.cpp, or None
_recorded: dict[str, Any] = recorder.operators() if recorder else {}  # operator: recorded in C++


def is_transformed() -> bool:
    """Whether torch.compile or a transform of torch.func traces this call, or forward-mode AD is in
    use.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def has_tangents(inputs: Iterable[Any]) -> bool:
    """Whether a tensor among `inputs` is a dual tensor of torch.autograd.forward_ad."""
    return forward_ad._current_level >= 0 and any(
        isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in inputs
    )


def transforms() -> set[Any]:
    """The kinds of torch.func's transforms that are active, as TransformType."""
    if not torch._C._are_functorch_transforms_active():
        return set()
    return {one.key() for one in retrieve_all_functorch_interpreters()}


def needs_oracle(inputs: Iterable[Any] = ()) -> bool:
    """Whether a call has tangents or a batch dimension of torch.func.vmap, for which there are no
    kernels.
    """
    return has_tangents(inputs) or not transforms().isdisjoint(
        (TransformType.Vmap, TransformType.Jvp)
    )


def call(op: str, *inputs: Any) -> Any:
    """`torch.ops.fusedseq.<op>(*inputs)` for an operator with a gradient, without the 45 us that an
    operator registered by torch.library.register_autograd spends in Python. Compilers get the
    registered operator, and transforms that no kernel supports the oracle; outputs that it does not
    compute are None then.
    """
    if torch.compiler.is_compiling():
        return getattr(torch.ops.fusedseq, op)(*inputs)
    if is_transformed():
        if needs_oracle(inputs):
            rule = _rules[op]
            found = rule.by_oracle(dict(zip(rule.schema.inputs, inputs, strict=True)))
            outputs = tuple(found.get(name) for name in rule.schema.outputs)
            return outputs if len(outputs) > 1 else outputs[0]
        active = transforms()
        if active == {TransformType.Grad}:
            return _functions[op].apply(*inputs)
        if active:
            return getattr(torch.ops.fusedseq, op)(*inputs)
    if op in _recorded:
        found = _recorded[op](*inputs)
        if found is not NotImplemented:
            return found
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        return _functions[op].apply(*inputs)
    return below(op, *inputs)


def call_by_name(op: str, named: Named) -> Any:
    """`call` with the operator's inputs taken from a mapping by their names; what else it holds is
    ignored.
    """
    return call(op, *[named[name] for name in _inputs[op]])


def unchecked(op: str, *inputs: Any) -> Any:
    """`call` for arguments that were not checked yet, with the seed as a number: NotImplemented
    unless C++ can tell that they are valid. In a small call the checks in Python are a third of
    the time.
    """
    if not _recorded or is_transformed():
        return NotImplemented
    return _recorded[op].checked(*inputs)


def below(op: str, *inputs: Any) -> Any:
    """`torch.ops.fusedseq.<op>(*inputs)` below the dispatcher's autograd keys: not recorded."""
    with torch._C._AutoDispatchBelowAutograd():
        return _overloads[op](*inputs)


def call_backward(
    op: str, named: Named, grads: Gradients, needed: frozenset[str], more_needs: int = 0
) -> Gradients:
    """Calls the operator `op` for the gradients of the inputs that are `needed`.

    named: saved inputs, saved outputs and settings of the forward call
    grads: the gradients of its results
    more_needs: bits of the argument `needs` beside those of the gradients
    """
    backward = _backwards[op]
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


class _Context:
    """Stands in for autograd's context where C++ has recorded the call: `setup` writes to it and
    `backward` reads it.
    """

    def __init__(self, needs: Iterable[bool]):
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _in_python(op: str, inputs: Any, outputs: Any, grads: Any, needs: Any) -> Any:
    """The gradients of a call that was recorded in C++, where C++ cannot compute them. Tensors that
    backward does not need are None.
    """
    ctx = _Context(needs)
    _rules[op].setup(ctx, inputs, outputs if len(outputs) > 1 else outputs[0])
    return _rules[op].backward(ctx, *grads)


if recorder:
    recorder.by_python(_in_python)


def call_reference(function: Callable[..., Any], named: Named) -> Any:
    """Calls a function of `fusedseq.reference` with those of its arguments that `named` holds; the
    others keep their defaults.
    """
    parameters = inspect.signature(function).parameters
    return function(**{name: named[name] for name in parameters if name in named})


def through_oracle(
    oracle: Callable[[Named], Any], named: Named, grads: Gradients, needed: frozenset[str]
) -> Gradients:
    """Returns gradients of `oracle(named)` that can be differentiated again, to any order.

    A backward that is recorded itself (create_graph=True) needs this, because `<op>_backward` has
    no derivative.

    oracle: returns a tensor or a nest of tensors, in the order of `grads`
    """
    order = [name for name in named if name in needed]
    upstream = [*grads.values()]

    def results(*values: Tensor) -> list[Tensor]:
        outputs = tree_flatten(oracle(named | dict(zip(order, values, strict=True))))[0]
        return [y for y, g in zip(outputs, upstream, strict=False) if g is not None]

    found = pull_back(results, [named[n] for n in order], [g for g in upstream if g is not None])
    return dict(zip(order, found, strict=True))


def pull_back(
    function: Callable[..., list[Tensor]],
    inputs: list[Tensor],
    grads: list[Tensor],
    create_graph: bool = True,
) -> Iterable[Tensor | None]:
    """Returns the gradients of `function(*inputs)`, a list of tensors whose gradients are `grads`;
    None for an input that no result depends on.
    """
    if torch._C._are_functorch_transforms_active():
        gradients: Callable[[list[Tensor]], tuple[Tensor, ...]] = torch.func.vjp(function, *inputs)[
            1
        ]
        return gradients(grads)
    with torch.enable_grad():
        # An alias of each input: one that is passed twice, or is computed from another, gets the
        # gradient of this use alone.
        aliases = [t.view_as(t) for t in inputs]
        pairs = [(y, g) for y, g in zip(function(*aliases), grads, strict=True) if y.requires_grad]
        if not pairs:
            return [None] * len(inputs)
        return torch.autograd.grad(
            [y for y, _ in pairs],
            aliases,
            [g for _, g in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
