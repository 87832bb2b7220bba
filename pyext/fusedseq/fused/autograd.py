"""How operators are called and recorded by autograd: registration with torch's dispatcher, and the
paths that a call takes.

The registered operator `torch.ops.fusedseq.<op>` is what compilers see. The public functions use
`call`, which records calls in C++ where that module was built (csrc/python/_autograd.cpp), and else
in Python. Both use the gradients of gradient.py.

Kernels compute an operator and its first gradients in reverse mode. Everything else is computed by
the operator's oracle: higher derivatives, forward mode (torch.func.jvp, jacfwd,
torch.autograd.forward_ad), and calls inside of torch.func.vmap; but all recurrences except
`mogrifier_lstm_pair` call their kernels there for one element after the other.

Some operators have a second form on the CPU, `<op>_inference`, which saves nothing for a backward:
`call` uses it where no gradients are needed. The recurrences have a third one, `<op>_int8`, which
is that with weights in 8 bits.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._library.autograd import Info, make_autograd_impl

from fusedseq import _load
from fusedseq.fused import transforms
from fusedseq.fused.gradient import Gradient, Rule, backwards, below, overloads
from fusedseq.fused.schema import BackwardSchema, Named, Schema, overload

INFERENCE = {"cpu"}  # device types that have kernels for `<op>_inference`
CHECKED_IN_CPP = {"cpu"}  # device types whose calls C++ can check (`call_if_valid`)
recorder = _load.recorder()  # the module of csrc/python/_autograd.cpp, or None
_recorded: dict[str, Any] = recorder.operators() if recorder else {}  # operator: recorded in C++
_inputs: dict[str, tuple[str, ...]] = {}  # operator: the names of its inputs
_rules: dict[str, Rule] = {}
_functions: dict[str, type[torch.autograd.Function]] = {}  # operator: what records it in Python
# operator with an `<op>_inference`: whether that returns each output
_kept: dict[str, tuple[bool, ...]] = {}


# (operator, device type) whose kernels disagreed with the oracle at their first use
switched_off: set[tuple[str, str]] = set()
_library = torch.library.Library("fusedseq", "IMPL")


def register(op: str, fake: Callable[[Named], Any], gradient: Gradient | None = None) -> None:
    """Registers the shapes of an operator's results, and its gradients.

    fake: (inputs by name) -> results on the meta device
    """
    register_fake(op, fake)
    if gradient is None:
        return
    rule = Rule(op, gradient)
    kernel = _autograd_kernel(op, rule)
    _library.impl(op, kernel, "Autograd", with_keyset=True)
    if hasattr(torch.ops.fusedseq, f"{op}_inference"):
        _register_inference(op, fake, kernel)
    _rules[op] = rule
    backwards.update(rule.backwards)
    _functions[op] = _function(op, rule)


def _autograd_kernel(op: str, rule: Rule) -> Callable[..., Any]:
    """The kernel of `torch.ops.fusedseq.<op>` for the dispatcher's autograd keys: that of
    torch.library.register_autograd, which drops tangents and refuses torch.func's transforms, and
    the oracle in their place.
    """
    record = make_autograd_impl(overload(op), Info(rule.backward, rule.setup))

    def kernel(keyset: Any, *inputs: Any) -> Any:
        if not (torch._C._are_functorch_transforms_active() or transforms.has_tangents(inputs)):
            return record(keyset, *inputs)
        named = dict(zip(rule.schema.inputs, inputs, strict=True))
        found = rule.by_oracle(named)
        if len(found) < len(rule.schema.outputs):  # tensors that only the backward reads
            saved = below(op, *inputs)
            found = dict(zip(rule.schema.outputs, saved, strict=True)) | found
        outputs = tuple(found[name] for name in rule.schema.outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    return kernel


def _register_inference(
    op: str, fake: Callable[[Named], Any], with_gradients: Callable[..., Any]
) -> None:
    """Registers the shapes of the results of `<op>_inference`, those of `op` with the same names,
    and its kernel for the dispatcher's autograd keys, which computes `op` if there is something to
    differentiate. On CUDA it is `op`, so that a program that was exported on the CPU runs there.

    fake: that of `op`    with_gradients: the kernel of `op` for the autograd keys
    """
    inference = f"{op}_inference"
    results, outputs = Schema(inference).outputs, Schema(op).outputs
    positions = [outputs.index(name) for name in results]

    def of_every(outputs: tuple[Tensor, ...]) -> Any:
        found = tuple(outputs[i] for i in positions)
        return found if len(found) > 1 else found[0]

    def fake_results(named: Named) -> Any:
        return of_every(fake(named))

    def kernel(keyset: Any, *inputs: Any) -> Any:
        is_transformed = torch._C._are_functorch_transforms_active()
        if is_transformed or transforms.has_tangents(inputs) or is_recorded(inputs):
            return of_every(with_gradients(keyset, *inputs))
        with torch._C._AutoDispatchBelowAutograd():
            return overloads[inference].redispatch(
                keyset & torch._C._after_autograd_keyset, *inputs
            )

    def on_cuda(*inputs: Any) -> Any:
        return of_every(overloads[op](*inputs))

    register_fake(inference, fake_results)
    if hasattr(torch.ops.fusedseq, f"{op}_int8"):
        register_fake(f"{op}_int8", fake_results)
    _library.impl(inference, kernel, "Autograd", with_keyset=True)
    _library.impl(inference, on_cuda, "CUDA")
    _kept[op] = tuple(name in results for name in outputs)


def inferring() -> Iterable[str]:
    """The operators that have an `<op>_inference`."""
    return _kept


def is_recorded(inputs: Iterable[Any]) -> bool:
    """Whether autograd records a call: whether an input requires a gradient."""
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in inputs
    )


def _may_infer(inputs: tuple[Any, ...]) -> bool:
    """Whether a call that no transform sees can be one of `<op>_inference`."""
    return inputs[0].device.type in INFERENCE and not is_recorded(inputs)


def _every_output(op: str, found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The outputs of an operator from those of `<op>_inference`; the others are None."""
    results = iter((found,) if isinstance(found, Tensor) else found)
    return tuple(next(results) if kept else None for kept in _kept[op])


def register_fake(op: str, fake: Callable[[Named], Any]) -> None:
    names = Schema(op).inputs

    def by_position(*values: Any, **more: Any) -> Any:
        return fake(dict(zip(names, values, strict=False)) | more)

    torch.library.register_fake(f"fusedseq::{op}", by_position)
    _inputs[op] = names
    overloads[op] = overload(op)


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


def _function(op: str, rule: Rule) -> type[torch.autograd.Function]:
    """What records calls of an operator in Python, named after it: profilers and printed graphs
    show FusedseqLinearBackward.
    """

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

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
            def of_one(*given: Any) -> Any:
                return _call(op, given, saves=True)

            return transforms.one_by_one(of_one, info.batch_size, in_dims, inputs)

    # torch names the backward node when the class is created.
    return type(f"Fusedseq{op.title().replace('_', '')}", (Recorded,), {})


class SwitchedOff(Exception):
    """Raised inside of a call whose kernels were found wrong at their first use and have been
    replaced by the oracle meanwhile (first_use/guard.py): one of the functions in `restarting` then
    makes the call again.
    """


def stop_recording_in_cpp() -> None:
    """Calls are recorded in Python from now on: records in C++ know gradients by kernels alone."""
    global recorder
    recorder = None
    _recorded.clear()


def call(op: str, *inputs: Any) -> Any:
    """`torch.ops.fusedseq.<op>(*inputs)` for an operator with a gradient, without the 45 us that an
    operator registered by torch.library.register_autograd spends in Python. Compilers get the
    registered operator, and transforms that no kernel supports the oracle. Outputs that only a
    backward reads are None in calls by the oracle, in calls that C++ records and in calls of
    `<op>_inference`.
    """
    try:
        return _call(op, inputs, saves=False)
    except SwitchedOff:
        return call(op, *inputs)


def _call(op: str, inputs: tuple[Any, ...], saves: bool) -> Any:
    """saves: whether no output may be None, as a backward follows even if none is recorded here"""
    infers = not saves and op in _kept
    if torch.compiler.is_compiling():
        if infers and _may_infer(inputs):
            inference = getattr(torch.ops.fusedseq, f"{op}_inference")
            return _every_output(op, inference(*inputs))
        return getattr(torch.ops.fusedseq, op)(*inputs)
    if transforms.is_transformed():
        rule = _rules[op]
        if rule.gradient.loops and transforms.only_batches(inputs):
            return _functions[op].apply(*inputs)
        if transforms.needs_oracle(inputs):
            found = rule.by_oracle(dict(zip(rule.schema.inputs, inputs, strict=True)))
            outputs = tuple(found.get(name) for name in rule.schema.outputs)
            return outputs if len(outputs) > 1 else outputs[0]
        active = transforms.active_transforms()
        if active == {TransformType.Grad}:
            return _functions[op].apply(*inputs)
        if active:
            return getattr(torch.ops.fusedseq, op)(*inputs)
    if op in _recorded and not saves:
        found = _recorded[op](*inputs)
        if found is not NotImplemented:
            return found
    if is_recorded(inputs):
        return _functions[op].apply(*inputs)
    if infers and _may_infer(inputs):
        return _every_output(op, below(f"{op}_inference", *inputs))
    return below(op, *inputs)


def call_by_name(op: str, named: Named) -> Any:
    """`call` with the operator's inputs taken from a mapping by their names; what else it holds is
    ignored.
    """
    return call(op, *[named[name] for name in _inputs[op]])


def without_gradients(op: str, named: Named) -> Any:
    """Calls a registered operator that has no gradients, as `call_by_name`."""
    return overloads[op](*[named[name] for name in _inputs[op]])


def call_if_valid(op: str, *inputs: Any) -> Any:
    """`call` for arguments that were not checked yet, with the seed as a number: NotImplemented
    unless C++ can tell that they are valid. In a small call the checks in Python are a third of
    the time.
    """
    if not _recorded or transforms.is_transformed():
        return NotImplemented
    try:
        return _recorded[op].checked(*inputs)
    except (SwitchedOff, NotImplementedError):  # no kernel: the checks in Python name the argument
        return NotImplemented


def inputs_of(op: str) -> tuple[str, ...]:
    """The names of an operator's inputs, in order."""
    return _inputs[op]


restarting = {call.__code__, call_if_valid.__code__}  # the functions that catch SwitchedOff


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
