"""Logits that are computed when something other than the cross-entropy reads them."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fusedseq import fused

# What these read is known without the logits.
METADATA = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.__hash__}
# What these set up runs when the gradient of the logits is computed, which no fused loss does.
GRADIENT_HOOKS = {
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
}
WIDENINGS = {Tensor.float, Tensor.to}
RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}


class DeferredLogits(Tensor):
    """The logits of an output layer, (..., V), before they are computed.

    `torch.nn.functional.cross_entropy`, and so torch.nn.CrossEntropyLoss, computes its loss by
    `fused.linear_cross_entropy`, without the logits. Reshapes that keep the last dimension, slices
    of the others, and the conversion of 16-bit logits to fp32 are deferred too. Anything else that
    reads or changes the logits computes them first, once, by `fused.linear`; from then on this
    object stands for that ordinary tensor, also in the loss, so that a change in place is seen
    everywhere. After such a loss a hook on the logits is refused, because it would never run.

    hidden: (..., E)    weight: (V, E)    bias: (V,) or None    versions: of the three
    source, take: of which logits this is a reshape, slice or conversion, and how to get it from
        them
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    versions: list[int]
    source: "DeferredLogits | None"
    take: Callable[[Tensor], Tensor]
    computed: Tensor | None
    has_loss: bool = False  # whether a loss was computed without the logits

    __init__ = object.__init__  # __new__ alone has arguments

    @property
    def is_deferred(self) -> bool:
        """Whether nothing has read the logits so far."""
        return self.origin.computed is None

    @property
    def origin(self) -> "DeferredLogits":
        """The logits that this is derived from, or itself."""
        return self if self.source is None else self.source

    def logits(self) -> Tensor:
        """Returns the logits as an ordinary tensor, always the same."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.computed is not None:
                return self.computed
            self.check_unchanged()
            # Whether their gradient is recorded was decided where the output layer was called.
            with as_called(self.device):
                if self.source is not None:
                    found = self.take(self.source.logits())
                else:
                    found = fused.linear(self.hidden, self.weight, self.bias)
            # What is computed within torch.func's transforms is not valid after them.
            if not torch._C._are_functorch_transforms_active():
                self.computed = found
            return found

    def check_unchanged(self) -> None:
        """Raises RuntimeError if the logits can no longer be computed.

        torch saves the same tensors for its gradient, and raises in backward.
        """
        if not self.is_deferred:
            return
        with torch._C.DisableTorchFunctionSubclass():
            now = versions(self.hidden, self.weight, self.bias)
            changed = any(versions(self)) or now != self.versions
        if changed and (self.has_loss or self.origin.has_loss):
            raise RuntimeError(
                "accelerate: the logits of an output layer, whose loss was computed without them, "
                "must be read before its parameters change, as by optimizer.step()"
            )
        if changed:
            raise RuntimeError(
                "accelerate: the input and the parameters of an output layer must stay unchanged "
                "until its loss is computed, and one was changed in place"
            )

    @classmethod
    @torch._disable_dynamo  # compiled code that takes deferred logits ends its graph here
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        x = args[0] if args else None
        if func in GRADIENT_HOOKS and isinstance(x, cls) and (x.has_loss or x.origin.has_loss):
            raise RuntimeError(
                "accelerate: a hook on the logits of an output layer must be registered before "
                f"their loss is computed, as it is computed without them, got {func.__name__} "
                "after it"
            )
        if isinstance(x, cls) and x.is_deferred:
            found = x if is_identity(func, x, args, kwargs) else None
            if func is F.cross_entropy:
                found = cross_entropy(*args, **kwargs)
            elif not kwargs and func in RESHAPES:
                found = reshape(func, x, args[1:])
            elif not kwargs and func is Tensor.__getitem__:
                found = rows(x, args[1])
            elif func in WIDENINGS and found is None:
                found = widened(func, x, args[1:], kwargs)
            if found is not None:
                return found
        args, kwargs = pytree.tree_map_only(cls, cls.logits, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Computes the logits for code that calls operators without `__torch_function__`."""
        args, kwargs = pytree.tree_map_only(cls, cls.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def values(self) -> Tensor:
        """Returns the logits below autograd, which goes through `Defer`."""
        return self.logits().detach()


def no_autocast(device: torch.device) -> torch.autocast:
    """Autocast was applied when the output layer was called."""
    return torch.autocast(device.type, enabled=False)


def no_saved_tensors_hooks() -> contextlib.AbstractContextManager[Any]:
    """A checkpoint around code that reads the logits must not count what their own gradient saves,
    because its second run finds them computed. Within torch.func no hooks are allowed.
    """
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    return saved_tensors_hooks(lambda t: t, lambda t: t)


@contextlib.contextmanager
def as_called(device: torch.device) -> Iterator[None]:
    """The modes in which the output layer was called, for the time of the computation."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        no_autocast(device),
        no_saved_tensors_hooks(),
    ):
        yield


def versions(*tensors: Tensor | None) -> list[int]:
    """Returns how often each tensor was changed in place."""
    return [0 if t is None or t.is_inference() else t._version for t in tensors]


class Defer(torch.autograd.Function):
    """Makes `DeferredLogits`. Only code that bypasses `__torch_function__` needs its backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        shape = (*hidden.shape[:-1], weight.size(0))
        found: DeferredLogits = Tensor._make_wrapper_subclass(
            DeferredLogits, shape, dtype=dtype, device=hidden.device
        )
        found.source = found.computed = None
        ctx.save_for_backward(hidden, weight, bias)
        ctx.result = weakref.ref(found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        result = ctx.result()
        computed = None if result is None else result.computed
        if any(versions(computed)):
            raise RuntimeError(
                "accelerate: the logits of an output layer must not be changed in place and then "
                "be given to code that bypasses __torch_function__, such as an autograd.Function"
            )
        saved = [
            None if t is None else t.detach().requires_grad_(n)
            for t, n in zip(ctx.saved_tensors, ctx.needs_input_grad[:3], strict=True)
        ]
        with torch.enable_grad():
            y = fused.linear(*saved)
        needed = [t for t in saved if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(y, needed, gradient.to(y.dtype)))
        all_found = [next(found) if t is not None and t.requires_grad else None for t in saved]
        return (*all_found, None)


def defer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
) -> DeferredLogits:
    """Returns linear(hidden, weight, bias), deferred. dtype: of the result, if it is converted"""
    with no_saved_tensors_hooks():
        found: DeferredLogits = Defer.apply(hidden, weight, bias, dtype or hidden.dtype)
    found.hidden, found.weight, found.bias = hidden, weight, bias
    found.versions = versions(hidden, weight, bias)
    return found


def derive(
    x: DeferredLogits,
    hidden: Tensor,
    take: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None = None,
) -> DeferredLogits:
    """Returns the deferred take(x), whose hidden rows are `hidden`. dtype: by default that of x"""
    x.check_unchanged()
    from_origin = take if x.source is None else (lambda logits: take(x.take(logits)))
    weight, bias = x.weight, x.bias
    if not torch.is_grad_enabled():  # then take(x) has no gradient, also where it is read later
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    found = defer(hidden, weight, bias, dtype or x.dtype)
    found.source = x.origin
    found.take = from_origin if found.requires_grad else (lambda z: from_origin(z).detach())
    return found


def is_identity(func: Any, x: DeferredLogits, args: Any, kwargs: Any) -> bool:
    """Returns whether func(*args) is x itself."""
    if len(args) > 1 or kwargs:
        return False
    return func is Tensor.contiguous or (func is Tensor.float and x.dtype == torch.float32)


def widened(func: Any, x: DeferredLogits, args: Any, kwargs: Any) -> DeferredLogits | None:
    """Returns func(x, *args), the logits converted to fp32, or None if it is anything else."""
    asked = (*args, *kwargs.values())
    is_fp32 = func is Tensor.float if not asked else asked == (torch.float32,)
    if not is_fp32 or not {*kwargs} <= {"dtype"} or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    return derive(x, x.hidden, lambda logits: logits.float(), torch.float32)


def reshape(func: Any, x: DeferredLogits, args: Any) -> DeferredLogits | None:
    """Returns func(x, *args), a reshape, or None if it does not keep the last dimension."""
    shape_only = torch.empty(x.shape, dtype=x.dtype, device="meta")
    wanted = func(shape_only, *args)
    if wanted.dtype != x.dtype or wanted.dim() == 0 or wanted.size(-1) != x.size(-1):
        return None
    if x.dim() == 0 or x.numel() == 0:
        return None
    hidden = x.hidden.reshape(*wanted.shape[:-1], x.hidden.size(-1))
    return derive(x, hidden, lambda logits: func(logits, *args))


def rows(x: DeferredLogits, index: Any) -> DeferredLogits | None:
    """Returns x[index], or None unless it slices or selects dimensions before the last."""
    parts = index if isinstance(index, tuple) else (index,)
    allowed = all(isinstance(part, (slice, int, type(...))) for part in parts)
    if not parts or not allowed or any(isinstance(part, bool) for part in parts):
        return None
    selected = [part for part in parts if part is not ...]
    reaches_last = len(selected) >= x.dim() or (... in parts and parts[-1] is not ...)
    if reaches_last and not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
        return None
    return derive(x, x.hidden[index], lambda logits: logits[index])


def cross_entropy(
    input: DeferredLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Returns torch.nn.functional.cross_entropy without logits, or None if it needs them."""
    x = input
    x.check_unchanged()
    is_usual = (
        x.dim() == 2
        and x.numel() > 0
        and isinstance(target, Tensor)
        and target.dtype == torch.int64
        and target.shape == x.shape[:1]
        and target.device == x.device
        and size_average is None
        and reduce is None
        and reduction in ("none", "mean", "sum")
        and 0 <= label_smoothing <= 1
        and (weight is None or (weight.dtype == x.dtype and weight.shape == x.shape[1:]))
        and (weight is None or weight.dtype == x.hidden.dtype)
        and (weight is None or (weight.device == x.device and not weight.requires_grad))
    )
    if not is_usual:
        return None
    is_wide = torch.is_autocast_enabled(x.device.type)  # F.cross_entropy is computed in fp32 then
    with no_autocast(x.device):
        loss: Tensor = fused.linear_cross_entropy(
            x.hidden,
            x.weight,
            target,
            x.bias,
            class_weights=weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
    x.has_loss = x.origin.has_loss = True
    return loss if is_wide else loss.to(x.dtype)
