"""Registration of what is the same for every operator: fakes, gradients, second gradients, autocast."""

import functools

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from fusedseq import _load


def register(op, fake, backward=None, setup=None, fakes=()):
    """`fake` is the shape function; `setup(ctx, inputs, output)` and `backward(ctx, *grads)` as in
    torch.library.register_autograd; `fakes`: (name, fake) of further operators that need no gradient."""
    for name, function in ((op, fake), *fakes):
        torch.library.register_fake(f"fusedseq::{name}", function)
    if backward:
        torch.library.register_autograd(f"fusedseq::{op}", backward, setup_context=setup)
        _ways[op] = setup, backward
        _functions[op] = _function(op, backward, setup)
    for name in (op, *dict(fakes)):
        _overloads[name] = getattr(torch.ops.fusedseq, name).default


_ways: dict[str, tuple] = {}  # operator: setup, backward
_functions: dict[str, type[torch.autograd.Function]] = {}  # operator: its way through autograd in Python
_overloads: dict[str, torch._ops.OpOverload] = {}  # operator: what is called


def _function(op, backward, setup):
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = below(op, *inputs)
            setup(ctx, inputs, output)
            return output

    Fused.backward = staticmethod(backward)
    return Fused


recorder = _load.recorder()  # csrc/_autograd.cpp, or None
_recorded = recorder.operators() if recorder else {}  # operator: its way through autograd in C++


def is_transformed():
    """Whether a compiler or a transform of torch.func looks on."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def call(op, *inputs):
    """`torch.ops.fusedseq.<op>(*inputs)`, for an operator with a gradient, without the 45 us that torch.library's own way
    through autograd takes; a compiler or a transform of torch.func is given the registered operator."""
    if is_transformed():
        return getattr(torch.ops.fusedseq, op)(*inputs)
    if op in _recorded:
        found = _recorded[op](*inputs)
        if found is not NotImplemented:
            return found
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs):
        return _functions[op].apply(*inputs)
    return below(op, *inputs)


def unchecked(op, *inputs):
    """`call` for inputs that nobody has checked, a seed as a number among them; NotImplemented unless it is certain that the
    checks would find no fault. Of a small call they are a third of the time."""
    if not _recorded or is_transformed():
        return NotImplemented
    return _recorded[op].checked(*inputs)


def below(op, *inputs):
    """`torch.ops.fusedseq.<op>(*inputs)` where nothing is recorded, past the dispatcher's keys of autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return _overloads[op](*inputs)


class _Context:
    """What a `setup` writes and its `backward` reads, once the call itself was recorded in C++."""

    def __init__(self, needs):
        self.needs_input_grad = tuple(needs)

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors):
        pass

    def set_materialize_grads(self, value):
        pass


def _by_python(op, inputs, outputs, grads, needs):
    """The gradients of a call recorded in C++ that C++ has no formula for. What backward does not need is None."""
    (setup, backward), ctx = _ways[op], _Context(needs)
    setup(ctx, inputs, outputs if len(outputs) > 1 else outputs[0])
    return backward(ctx, *grads)


if recorder:
    recorder.by_python(_by_python)


def through_oracle(oracle, inputs, needs, grads):
    """Gradients of `oracle(*inputs)` that can be differentiated again, to any order, for the inputs that need one.

    A backward that is itself recorded (create_graph=True) takes this way: the fused backward has no derivative.
    oracle: returns a tensor or a nest of them    inputs: the values it was called with, tensors anywhere in them
    needs: a bool for each of the flat tensors in `inputs`    grads: of its flat results, None where there is none
    returns a gradient or None for each flat entry of `inputs`
    """
    flat, tree = tree_flatten(inputs)
    with torch.enable_grad():
        # Aliases: an input that stands twice, or is made from another, gets the gradient of its own place alone.
        flat = [t.view_as(t) if need else t for t, need in zip(flat, needs, strict=True)]
        outputs = tree_flatten(oracle(*tree_unflatten(flat, tree)))[0]
        pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=False) if dy is not None]
        wanted = [t for t, need in zip(flat, needs, strict=True) if need]
        found = iter(torch.autograd.grad(*map(list, (next(zip(*pairs, strict=True)), wanted)),
                                         [dy for _, dy in pairs], create_graph=True, allow_unused=True))  # fmt: skip
    return [next(found) if need else None for need in needs]


def autocast_is_on(device_type):
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def autocast(device_type, *tensors):
    """The tensors as torch's autocast wants them for matrix products: fp32 ones in its dtype, where it is on."""
    if not autocast_is_on(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype == torch.float32 else t for t in tensors)


def widest(device_type, *tensors):
    """Under autocast the tensors in the widest of their dtypes, as torch promotes those of a sum; else as they are."""
    if not autocast_is_on(device_type):
        return tensors
    floats = [t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()]
    dtype = functools.reduce(torch.promote_types, floats) if floats else None
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors)
