"""Weights of 8 bits: a tensor subclass that the operators take in place of a float weight."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedseq.fused import autograd, transforms
from fusedseq.fused.schema import Named

LARGEST = 127  # of the whole numbers, so that a weight and its negative are rounded alike
FEW_ROWS = 8  # up to which csrc/cpu/gemm/linear_int8.h reads a weight without packing it
LARGE_IN_STEPS = 1_000_000  # elements of W_hh: see computes_in_steps
DEVICES = {"cpu"}  # that have the kernel of `linear_int8`
aten: Any = torch.ops.aten


class Int8Weight(Tensor):
    """A weight in 8 bits with one scale for each output: row `n` is `scale[n] * int8[n]`.

    `linear` multiplies by the whole numbers themselves, on a CPU; every other operator and every
    function of torch gets `dequantize()`. The weight is a constant: gradients flow through a
    product to its other operand alone.

    int8: (..., N, K) int8, in [-127, 127]
    scale: (..., N) fp32
    dtype: what the weight is taken for, of `dequantize()` and of results
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
        two dimensions or more and is finite.
        """
        if not weight.is_floating_point():
            raise TypeError(f"Int8Weight: weight must be floating-point, got {weight.dtype}")
        if weight.dim() < 2:
            raise ValueError(f"Int8Weight: weight must be (..., N, K), got {tuple(weight.shape)}")
        numbers = weight.detach().float()
        if not numbers.isfinite().all():
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
        return Int8Weight(change(self.int8), change(self.scale), self.dtype)

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
        plain = torch.utils._pytree.tree_map_only(Int8Weight, Int8Weight.dequantize, (args, kwargs))
        return func(*plain[0], **plain[1])


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
    aten.alias.default: lambda weight: weight.with_parts(aten.alias),
    aten.clone.default: lambda weight, **_: weight.with_parts(Tensor.clone),
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
}


def check_constant(W: Any) -> None:
    """Raises ValueError for an Int8Weight that requires a gradient."""
    if isinstance(W, Int8Weight) and W.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "Int8Weight: requires_grad must be False, as weights in 8 bits have no gradient, got "
            "True"
        )


def parts(W: Any) -> tuple[Tensor, Tensor] | None:
    """Returns the whole numbers and the scales of a weight in 8 bits, or None for any other: of an
    Int8Weight, or of the Int8Tensor that torchao makes for Int8WeightOnlyConfig.

    Errors: ValueError for an Int8Weight that requires a gradient.
    """
    if isinstance(W, Int8Weight):
        check_constant(W)
        return W.int8, W.scale
    if type(W).__name__ != "Int8Tensor" or not type(W).__module__.startswith("torchao."):
        return None
    numbers, scale = W.qdata, W.scale
    is_by_row = scale.numel() == len(numbers)
    if not is_by_row or W.act_quant_kwargs is not None or W.act_pre_scale is not None:
        return None
    return numbers, scale.flatten().float()


def dequantized(*weights: Any) -> tuple[Any, ...]:
    """The weights with every Int8Weight as a tensor of its dtype. Errors: as `parts`."""
    for W in weights:
        check_constant(W)
    return tuple(W.dequantize() if isinstance(W, Int8Weight) else W for W in weights)


def has_product(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernel of `linear_int8` computes a product with x: in float, without gradients,
    on a device that has it. Otherwise the product takes `dequantize()`.
    """
    if x.device.type not in DEVICES or x.dtype == torch.float64 or transforms.needs_oracle((x,)):
        return False
    tensors = [t for t in (x, *others) if t is not None]
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


class Product:
    """Stands in for a weight in a definition of `fusedseq.reference`, which writes a product as
    `x @ W.T`: computes it by `linear_int8`.
    """

    def __init__(self, W: Int8Weight) -> None:
        self.int8, self.scale = W.int8, W.scale

    def __len__(self) -> int:
        return len(self.int8)

    def __getitem__(self, k: int) -> "Product":
        row = object.__new__(Product)
        row.int8, row.scale = self.int8[k], self.scale[k]
        return row

    @property
    def T(self) -> "Product":
        return self

    def __rmatmul__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.fusedseq.linear_int8(x, self.int8, self.scale, None)
        return y


def products(weight: Any) -> Any:
    """A recurrence's weight, pair of factors or None with a Product for each Int8Weight."""
    if isinstance(weight, tuple):
        return tuple(products(W) for W in weight)
    return Product(weight) if isinstance(weight, Int8Weight) else weight


def in_steps(
    definition: Callable[..., Any], x: Tensor, **given: Any
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Calls the definition of a recurrence with products by `linear_int8`, in float.

    x: (T, B, X)    given: the other arguments by name
    returns y, (h, c) in the dtype of x
    """
    in_float = {
        name: value.float() if type(value) is Tensor and value.is_floating_point() else value
        for name, value in given.items()
    }
    with_products = {name: products(value) for name, value in in_float.items()}
    y, (h, c) = definition(x.float(), **with_products)
    return y.to(x.dtype), (h.to(x.dtype), c.to(x.dtype))


def computes_in_steps(x: Tensor, weights: tuple[Any, ...], *others: Tensor | None) -> bool:
    """Whether a recurrence for inference calls `linear_int8` at every step. Otherwise its weights
    are converted, which a single step takes longer for than for its products.

    Every weight must be an Int8Weight. A sequence of several steps must have one row and large
    weights too, because a step from Python costs more than one of the kernel.
    weights: W_ih, W_hh and more    others: further arguments, which must not have gradients
    Errors: as `parts`.
    """
    if not all(isinstance(W, Int8Weight) for W in weights) or torch.compiler.is_compiling():
        return False
    for W in weights:
        check_constant(W)
    T, B, _ = x.shape
    is_fast = B <= FEW_ROWS if T == 1 else B == 1 and weights[1].numel() >= LARGE_IN_STEPS
    return is_fast and has_product(x, *others)


def fake(named: Named) -> Tensor:
    x: Tensor = named["x"]
    return x.new_empty(*x.shape[:-1], named["W"].size(0))


autograd.register_fake("linear_int8", fake)
torch.serialization.add_safe_globals([Int8Weight])
