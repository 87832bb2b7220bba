"""Weights in 8 bits: a tensor subclass that the operators take in place of a float weight."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from fusedseq.fused import autocast, autograd, transforms
from fusedseq.fused.gradient import overloads
from fusedseq.fused.schema import Named

LARGEST = 127  # of the whole numbers, so that a weight and its negative are rounded alike
DEVICES = {"cpu"}  # that have the kernels of `linear_int8` and of the recurrences' `<op>_int8`
aten: Any = torch.ops.aten


class Int8Weight(Tensor):
    """A weight in 8 bits with one scale for each output: row `n` is `scale[n] * int8[n]`.

    `linear` and the recurrences multiply by the whole numbers themselves, on a CPU; every other
    operator and every function of torch gets `dequantize()`. The weight is a constant: gradients
    flow through a product to its other operand alone, and requires_grad stays False. `copy_`, also
    of a slice of rows, rounds new numbers into it. Any other change in place is an error
    (NotImplementedError).

    int8: (..., N, K) int8, in [-127, 127]
    scale: (..., N) fp32
    dtype: the dtype that the weight reports, of `dequantize()` and of the results of products
    """

    int8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, int8: Tensor, scale: Tensor, dtype: torch.dtype) -> "Int8Weight":
        made: Int8Weight = Tensor._make_wrapper_subclass(
            cls, int8.shape, strides=int8.stride(), dtype=dtype, device=int8.device
        )
        return made

    def __init__(self, int8: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.int8, self.scale = int8, scale

    @classmethod
    def from_float(cls, weight: Tensor) -> "Int8Weight":
        """Rounds a weight (..., N, K): symmetric, with scale = max |row| / 127.

        The error of an element is at most half the scale of its row.
        Errors: TypeError unless the weight is of floating-point numbers; ValueError unless it has
        two dimensions or more and is finite in fp32.
        """
        if not weight.is_floating_point():
            raise TypeError(f"Int8Weight: weight must be floating-point, got {weight.dtype}")
        if weight.dim() < 2:
            raise ValueError(f"Int8Weight: weight must be (..., N, K), got {tuple(weight.shape)}")
        numbers = weight.detach().float()
        if not numbers.isfinite().all():
            if weight.detach().isfinite().all():
                most, largest = torch.finfo(torch.float32).max, weight.detach().abs().max()
                raise ValueError(
                    f"Int8Weight: weight must be at most {most:.3g}, the largest number of fp32, "
                    f"got {largest:.3g}"
                )
            raise ValueError("Int8Weight: weight must be finite, got NaN or infinity")
        if numbers.numel() == 0:
            scale = numbers.new_ones(numbers.shape[:-1])
        else:
            scale = numbers.abs().amax(-1) / LARGEST
        # A row of zeros, or of numbers so small that the quotient is 0, is zeros at any scale.
        scale = torch.where(scale > 0, scale, 1.0)
        rounded = (numbers / scale[..., None]).round().clamp(-LARGEST, LARGEST)
        return cls(rounded.to(torch.int8), scale, weight.dtype)

    def dequantize(self) -> Tensor:
        """Returns the weight as a tensor of its dtype."""
        computing = torch.promote_types(self.dtype, torch.float32)
        return self.int8.to(computing).mul_(self.scale[..., None]).to(self.dtype)

    def with_parts(self, change: Callable[[Tensor], Tensor]) -> "Int8Weight":
        """Returns the weight whose whole numbers and scales are `change` of this one's."""
        int8, scale = change(self.int8), change(self.scale)
        if not torch.is_inference_mode_enabled() or self.is_inference():
            return Int8Weight(int8, scale, self.dtype)
        with torch.inference_mode(False):  # torch requires it of a view of an ordinary tensor
            return Int8Weight(int8, scale, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Int8Weight({tuple(self.shape)}, {self.dtype}, {self.device})"

    # How torch.compile takes the weight apart and makes it again.
    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["int8", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> "Int8Weight":
        return Int8Weight(parts["int8"], parts["scale"], dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs:
            from fusedseq.fused.linear import linear

            return linear(*args)
        if func in METHODS and isinstance(args[0], Int8Weight):
            return METHODS[func](*args, **(kwargs or {}))
        # Not that of Tensor, which would make every result an Int8Weight.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in KEEPING and isinstance(args[0], Int8Weight):
            kept = KEEPING[func](*args, **kwargs)
            if kept is not None:
                return kept
        if func._schema.is_mutable:
            check_unchanged(func, args, kwargs)
        if torch.is_inference_mode_enabled():
            return in_inference_mode(func, args, kwargs)
        return of_plain_tensors(func, args, kwargs)


def of_plain_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of torch with `dequantize()` for every Int8Weight."""
    plain = torch.utils._pytree.tree_map_only(Int8Weight, Int8Weight.dequantize, (args, kwargs))
    return func(*plain[0], **plain[1])


def in_inference_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`of_plain_tensors` in inference mode, where torch decomposes no function before its dispatch
    and requires that a view of an ordinary tensor is an ordinary tensor.
    """
    found = func.decompose(*args, **kwargs)
    if found is not NotImplemented:
        return found
    with torch.inference_mode(not func.is_view):
        return of_plain_tensors(func, args, kwargs)


def _to_copy(weight: Int8Weight, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return None
    moved = weight.with_parts(lambda t: t.to(device))
    return Int8Weight(moved.int8, moved.scale, dtype or weight.dtype)


def _copy(weight: Int8Weight, source: Tensor, non_blocking: bool = False) -> Int8Weight:
    given = source if isinstance(source, Int8Weight) else Int8Weight.from_float(source)
    weight.int8.copy_(given.int8)
    weight.scale.copy_(given.scale)
    return weight


def _select(weight: Int8Weight, dim: int, index: int) -> Int8Weight | None:
    return weight.with_parts(lambda t: t[index]) if dim == 0 and weight.dim() > 2 else None


def _slice(weight: Int8Weight, dim: int = 0, *bounds: Any) -> Int8Weight | None:
    if dim != 0:
        return None
    return weight.with_parts(lambda t: aten.slice(t, 0, *bounds))


# Functions of torch whose result is a weight of 8 bits again, unless they return None.
KEEPING: dict[Any, Callable[..., Any]] = {
    aten.detach.default: lambda weight: weight.with_parts(Tensor.detach),
    aten.detach_.default: lambda weight: weight,
    aten.alias.default: lambda weight: weight.with_parts(aten.alias),
    aten.clone.default: lambda weight, **_: weight.with_parts(Tensor.clone),
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
}


def check_unchanged(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises NotImplementedError if a function of torch writes to an Int8Weight."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[i] if i < len(args) else kwargs.get(argument.name)
        if any(isinstance(t, Int8Weight) for t in torch.utils._pytree.tree_leaves(written)):
            refuse_change(func._schema.name.removeprefix("aten::"))


def refuse_change(name: str) -> NoReturn:
    raise NotImplementedError(
        "Int8Weight: a weight in 8 bits must be changed by copy_, which rounds: "
        f"weight.copy_(a float tensor of its shape), got {name}"
    )


def _set_item(weight: Int8Weight, index: Any, value: Any) -> None:
    # Other parts than slices of rows are dequantized copies.
    if not isinstance(weight[index], Int8Weight):
        refuse_change("an assignment to elements")
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.__setitem__(weight, index, value)


def _copy_without_gradient(weight: Int8Weight, *args: Any, **kwargs: Any) -> Int8Weight:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return cast(Int8Weight, Tensor.copy_(weight, *args, **kwargs))


def _share_memory(weight: Int8Weight) -> Int8Weight:
    weight.int8.share_memory_()
    weight.scale.share_memory_()
    return weight


_data, _requires_grad = (getattr(Tensor, name) for name in ("data", "requires_grad"))
# Methods of torch.Tensor that do something else, or that `__torch_dispatch__` does not see.
METHODS: dict[Any, Callable[..., Any]] = {
    Tensor.__setitem__: _set_item,
    Tensor.copy_: _copy_without_gradient,
    _data.__set__: lambda weight, value: refuse_change("an assignment to data"),
    _requires_grad.__set__: lambda weight, value: None,
    Tensor.requires_grad_: lambda weight, *_, **__: weight,
    Tensor.share_memory_: _share_memory,
    Tensor.is_shared: lambda weight: weight.int8.is_shared() and weight.scale.is_shared(),
}


def parts(W: Any) -> tuple[Tensor, Tensor] | None:
    """Returns the whole numbers and the scales of a weight in 8 bits, or None for any other: of an
    Int8Weight, or of the Int8Tensor that torchao makes for Int8WeightOnlyConfig.
    """
    if isinstance(W, Int8Weight):
        return W.int8, W.scale
    if type(W).__name__ != "Int8Tensor" or not type(W).__module__.startswith("torchao."):
        return None
    numbers, scale = W.qdata, W.scale
    is_by_row = scale.numel() == len(numbers)
    if not is_by_row or W.act_quant_kwargs is not None or W.act_pre_scale is not None:
        return None
    return numbers, scale.flatten().float()


def dequantized(*weights: Any) -> tuple[Any, ...]:
    """The weights with every Int8Weight as a tensor of its dtype."""
    return tuple(W.dequantize() if isinstance(W, Int8Weight) else W for W in weights)


def has_product(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernel of `linear_int8` computes a product with x: in float, without gradients,
    on a device that has it. Otherwise the product takes `dequantize()`.
    """
    if x.device.type not in DEVICES or x.dtype == torch.float64 or transforms.needs_oracle((x,)):
        return False
    tensors = [t for t in (x, *others) if t is not None]
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def has_recurrence(
    x: Tensor, weights: Iterable[Any], others: Iterable[Tensor | None], is_random: Any
) -> bool:
    """Whether the kernel of `<op>_int8` computes a recurrence: for inference, if every weight that
    is not None is an Int8Weight. Otherwise the recurrence takes `dequantize()`.

    others: the further tensors, which must not have gradients    is_random: whether it has a mask
    """
    is_int8 = all(W is None or isinstance(W, Int8Weight) for W in weights)
    return is_int8 and not is_random and has_product(x, *others)


def call(op: str, named: Named, weights: Iterable[str]) -> Any:
    """Calls `<op>_int8`, and returns what `<op>_inference` returns.

    named: the inputs of `<op>` by name    weights: the names of its weights, an Int8Weight or None
    """
    inputs = dict(named)
    for name in weights:
        W = named[name]
        inputs[name], inputs[f"{name}_scale"] = (None, None) if W is None else (W.int8, W.scale)
    return autograd.without_gradients(f"{op}_int8", inputs)


def call_if_valid(op: str, *inputs: Any) -> Any:
    """`autograd.call_if_valid` of `linear`, or of a recurrence that draws no masks. Weights in 8
    bits are multiplied as they are.
    """
    found = autograd.call_if_valid(op, *inputs)
    return _call_int8_if_valid(op, inputs) if found is NotImplemented else found


def call_by_name_if_valid(op: str, named: Named) -> Any:
    """`call_if_valid` with the operator's inputs taken from a mapping by their names."""
    return call_if_valid(op, *[named[name] for name in autograd.inputs_of(op)])


def _call_int8_if_valid(op: str, values: tuple[Any, ...]) -> Any:
    """The results of `<op>_int8` for arguments that were not checked yet: NotImplemented unless
    this function and the operator find them valid, and a weight has 8 bits.
    """
    x = values[0]
    if transforms.is_transformed() or torch.is_grad_enabled() or type(x) is not Tensor:
        return NotImplemented
    weights = [W for W in values if type(W) is Int8Weight]
    if not weights or x.device.type not in DEVICES or autocast.is_on(x.device.type):
        return NotImplemented
    if x.dtype == torch.float64:  # as in has_product
        return NotImplemented
    # Without this, each attribute of a weight takes a call of its __torch_function__.
    with torch._C.DisableTorchFunctionSubclass():
        dtype = x.dtype
        if not all(W.dtype == dtype for W in weights):
            return NotImplemented
    inputs: list[Any] = []
    for position, is_scale in _sources(op):
        value = None if position is None else values[position]
        if type(value) is Int8Weight:
            value = value.scale if is_scale else value.int8
        elif is_scale:
            value = None
        inputs.append(value)
    try:
        return overloads[f"{op}_int8"](*inputs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return NotImplemented  # the checks in Python say what is wrong


@functools.cache
def _sources(op: str) -> tuple[tuple[int | None, bool], ...]:
    """Of each input of `<op>_int8` without masks: the position of the input of `op` that it comes
    from, None for the seed, and whether it is the scales of that weight.
    """
    names = autograd.inputs_of(op)

    def source(name: str) -> tuple[int | None, bool]:
        if name in names:
            return None if name == "seed" else names.index(name), False
        return names.index("W" if op == "linear" else name.removesuffix("_scale")), True

    return tuple(source(name) for name in autograd.inputs_of(f"{op}_int8"))


def fake(named: Named) -> Tensor:
    x: Tensor = named["x"]
    return x.new_empty(*x.shape[:-1], named["W"].size(0))


autograd.register_fake("linear_int8", fake)
torch.serialization.add_safe_globals([Int8Weight])
