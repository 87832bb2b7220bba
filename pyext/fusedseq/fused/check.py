"""Argument checks of the public functions. Every message names the operator, the argument, what was
required and what was given. The registered operators repeat only those checks without which they
would touch foreign memory.
"""

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode as get_mode
from torch._C import _TorchDispatchModeKey as ModeKey
from torch._subclasses.fake_tensor import FakeTensor

from fusedseq.fused import autocast

# The modes under which tensors have no data, or under which reading it would be recorded.
TRACING = (ModeKey.FAKE, ModeKey.PROXY)
CPU: dict[str, tuple[torch.dtype, ...]] = {"cpu": (torch.float32, torch.float64, torch.bfloat16)}
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    **CPU,
    "cuda": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
}
# The dtypes of the operators whose CUDA kernels are written in Triton.
TRITON: dict[str, tuple[torch.dtype, ...]] = {
    **CPU,
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
LAYOUTS = (torch.strided, torch.jagged)  # jagged is that of nested tensors
NUMBERS = (int, float, numbers.Real, torch.SymInt, torch.SymFloat)
WHOLE_NUMBERS = (int, numbers.Integral, torch.SymInt)


def tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if value.layout not in LAYOUTS:
        raise TypeError(f"{op}: {name} must be a dense tensor, got {value.layout}")
    if value.is_nested and value.layout != torch.jagged:
        raise TypeError(f"{op}: {name} must be a dense tensor, got a nested tensor with strides")


def like(
    op: str,
    first: Any,
    first_name: str,
    optional: Sequence[str] = (),
    dtypes: Mapping[str, tuple[torch.dtype, ...]] = DTYPES,
    **others: Any,
) -> None:
    """Requires that the device's kernels support the dtype of `first`, and that every other tensor
    has the device and the dtype of `first`.

    optional: the names of `others` that may be None    dtypes: {device type: the dtypes of its
    kernels}
    """
    tensor(op, first_name, first)
    if first.is_nested:
        raise TypeError(f"{op}: {first_name} must be a dense tensor, got a nested tensor")
    known = dtypes.get(first.device.type)
    if not first.is_floating_point() or (known and first.dtype not in known):
        wanted = " or ".join(
            str(dtype).removeprefix("torch.") for dtype in known or (torch.float32,)
        )
        by = ", to which autocast casts it" * autocast.is_dtype(first.device.type, first.dtype)
        raise TypeError(
            f"{op}: {first_name} must be {wanted} on {first.device.type}, got {first.dtype}{by}"
        )
    for name, value in others.items():
        if value is None and name in optional:
            continue
        tensor(op, name, value)
        if value.dtype != first.dtype:
            raise TypeError(
                f"{op}: {name} must be of the dtype of {first_name}, {first.dtype}, got "
                f"{value.dtype}"
            )
        if value.device != first.device:
            raise ValueError(
                f"{op}: {name} must be on the device of {first_name}, {first.device}, got "
                f"{value.device}"
            )


def shape(op: str, name: str, value: Tensor, symbols: str, wanted: Sequence[int]) -> None:
    """Requires a shape. symbols: the shape in letters, for the message, as "(4H, H)" for (16, 4)"""
    if tuple(value.shape) != tuple(wanted):
        raise ValueError(
            f"{op}: {name} must be {symbols} = {tuple(wanted)}, got {tuple(value.shape)}"
        )


def dimensions(op: str, name: str, value: Tensor, symbols: str) -> None:
    """Requires as many dimensions as `symbols` names: three for "(T, B, X)"."""
    if value.dim() != symbols.count(",") + 1 - symbols.count(",)"):
        raise ValueError(f"{op}: {name} must be {symbols}, got {tuple(value.shape)}")


def sizes(op: str, name: str, value: Any) -> None:
    """Requires the sizes of a new tensor."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{op}: {name} must be a tuple or list of sizes, got {value!r}")
    for n in value:
        whole_number(op, name, n)
    if any(n < 0 for n in value):
        raise ValueError(f"{op}: {name} must be sizes of at least 0, got {tuple(value)}")


def number(op: str, name: str, value: Any) -> None:
    """Requires a real number of Python, NumPy or a compiler that traces it."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")


def whole_number(op: str, name: str, value: Any, more: str = "") -> int:
    """Returns a whole number of Python, NumPy (as an int) or a compiler that traces it.

    more: what else is allowed, for the message
    """
    if isinstance(value, bool) or not isinstance(value, WHOLE_NUMBERS):
        got = type(value).__name__
        raise TypeError(f"{op}: {name} must be a whole number{more}, got {got}")
    if isinstance(value, torch.SymInt):
        return cast(int, value)
    if not -(2**63) <= (number := int(value)) < 2**63:
        raise ValueError(f"{op}: {name} must be a whole number of 64 bits{more}, got {number}")
    return number


def flag(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def flags(op: str, **values: Any) -> None:
    for name, value in values.items():
        flag(op, name, value)


def probability(op: str, name: str, p: Any) -> None:
    number(op, name, p)
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: {name} must be in [0, 1], got {p}")


def at_least_zero(op: str, name: str, value: Any) -> None:
    number(op, name, value)
    if not value >= 0:
        raise ValueError(f"{op}: {name} must be at least 0, got {value}")


def is_readable(value: Tensor) -> bool:
    """Whether the values of a tensor can be read: not in compiled or traced code, under a transform
    of torch.func, of a tensor without data (FakeTensor), or on other devices than the CPU, where
    reading would synchronize.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or value.device.type != "cpu"
        or value.numel() == 0
        or isinstance(value, FakeTensor)
        or (torch._C._len_torch_dispatch_stack() and any(map(get_mode, TRACING)))
    )


def whole_numbers(
    op: str,
    name: str,
    value: Any,
    low: int,
    high: int,
    symbols: Callable[[], str],
    error: type[Exception] = ValueError,
) -> None:
    """Requires int64 values in [low, high]; the caller has converted int32. Where they are not
    readable, the kernel checks them.

    symbols: returns [low, high] in letters, for the message. It is a function, since torch.compile
        compiles anew for each value of a size that becomes text
    """
    tensor(op, name, value)
    if value.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be int64 or int32, got {value.dtype}")
    if not is_readable(value):
        return
    least, most = (int(v) for v in value.aminmax())
    if least < low or most > high:
        raise error(f"{op}: {name} must be in {symbols()}, got {least if least < low else most}")


def int64(value: Any) -> Any:
    """Returns an int32 tensor as int64, and anything else unchanged, for the checks that follow."""
    return value.long() if isinstance(value, Tensor) and value.dtype == torch.int32 else value


def is_int64(n: int) -> bool:
    return -(2**63) <= n < 2**63


def to_lengths(value: Any, device: torch.device | str) -> Any:
    """Returns a list or tuple of ints, or an integer tensor, as an int64 tensor on `device`, and
    anything else unchanged. Modules convert lengths once for all their operators, which check them.
    """
    if isinstance(value, (list, tuple)) and all(type(n) is int and is_int64(n) for n in value):
        return torch.tensor(value, dtype=torch.int64, device=device)
    value = int64(value)
    is_on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
    return value.to(device) if is_on_cpu else value


def lengths(
    op: str, name: str, value: Any, first: Tensor, first_name: str, B: int, most: int, symbol: str
) -> Tensor:
    """Requires B ints in [0, most], as a list, a tuple, or an int64 or int32 tensor on the CPU or
    on the device of `first`. Returns them as int64 on the device of `first`. Values that are on the
    CPU are checked before they are copied to another device.

    symbol: the letter of `most`, for the message
    """
    if isinstance(value, (list, tuple)):
        wrong = {type(n).__name__ for n in value if not isinstance(n, int) or isinstance(n, bool)}
        if wrong:
            raise TypeError(
                f"{op}: {name} must be a tensor or a list of ints, got {type(value).__name__} "
                f"with {sorted(wrong)}"
            )
        if huge := [n for n in value if not is_int64(n)]:
            raise ValueError(f"{op}: {name} must be in [0, {symbol}] = [0, {most}], got {huge[0]}")
        value = torch.tensor(value, dtype=torch.int64, device="cpu")
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{op}: {name} must be a tensor or a list of ints, got {type(value).__name__}"
        )
    if value.device not in (first.device, torch.device("cpu")):
        raise ValueError(
            f"{op}: {name} must be on the CPU or on the device of {first_name}, {first.device}, "
            f"got {value.device}"
        )
    counts: Tensor = int64(value)
    whole_numbers(op, name, counts, 0, most, lambda: f"[0, {symbol}] = [0, {most}]")
    shape(op, name, counts, "(B,)", (B,))
    return counts.to(first.device)


def starts(op: str, value: Any, x: Tensor, name: str = "starts") -> None:
    """Requires None or a bool tensor (T, B) on the device of x (T, B, X)."""
    if value is None:
        return
    tensor(op, name, value)
    if value.dtype != torch.bool:
        raise TypeError(f"{op}: {name} must be bool, got {value.dtype}")
    if value.device != x.device:
        raise ValueError(f"{op}: {name} must be on the device of x, {x.device}, got {value.device}")
    T, B, _ = x.shape
    shape(op, name, value, "(T, B)", (T, B))


def offsets(
    op: str, name: str, value: Any, first: Tensor, first_name: str, reads: bool = False
) -> Tensor:
    """Requires the positions in the first dimension of `first` where sequences begin, and its size:
    ints that rise from 0, in an int64 or int32 tensor on the CPU or on the device of `first`.
    Returns them as int64 on the device of `first`.

    reads: whether to wait for a GPU and check values there, too
    """
    tensor(op, name, value)
    rows = first.size(0)
    found: Tensor = int64(value)
    if found.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be int64 or int32, got {found.dtype}")
    if found.device not in (first.device, torch.device("cpu")):
        raise ValueError(
            f"{op}: {name} must be on the CPU or on the device of {first_name}, {first.device}, "
            f"got {found.device}"
        )
    if found.dim() != 1 or found.size(0) == 0:
        raise ValueError(f"{op}: {name} must be (B + 1,), got {tuple(found.shape)}")
    if (reads or is_readable(found)) and (
        found[0] != 0 or found[-1] != rows or bool((found.diff() < 0).any())
    ):
        raise ValueError(
            f"{op}: {name} must rise from 0 to the number of rows of {first_name}, {rows}, got "
            f"{found.tolist()}"
        )
    return found.to(first.device)


def longest(op: str, name: str, value: Any, offsets: Tensor) -> int:
    """Requires a whole number of at least the length of the longest sequence, or None. Returns it,
    or that length for None, which waits for a GPU.

    offsets: as `offsets` returns them; a given value is compared with them where they are readable
    """
    if value is not None:
        whole_number(op, name, value)
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{op}: {name} must be at least 0, got {value}")
        if not is_readable(offsets):
            return cast(int, value)
    lengths = offsets.diff()
    most = int(lengths.max()) if lengths.numel() else 0
    if value is not None and most > value:
        raise ValueError(
            f"{op}: {name} must be at least the length of the longest sequence, {most}, got {value}"
        )
    return most if value is None else cast(int, value)


def classes(op: str, name: str, value: Any, V: int, ignore_index: int) -> None:
    """Requires int64 values in [0, V) or equal to ignore_index; read where `whole_numbers` reads
    them.
    """
    tensor(op, name, value)
    if value.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be int64 or int32, got {value.dtype}")
    if not is_readable(value):
        return
    least, most = value.aminmax()
    if least >= 0 and most < V:
        return
    wrong = ((value < 0) | (value >= V)) & (value != ignore_index)
    if wrong.any():
        raise IndexError(
            f"{op}: {name} must be in [0, V) = [0, {V}) or ignore_index = {ignore_index}, got "
            f"{value[wrong][0]}"
        )


def seed(op: str, value: Any, device: torch.device | str, name: str = "seed") -> Tensor:
    """Returns the seed, any 64-bit integer or an int64 tensor of one element, as the tensor that
    the operators take.
    """
    if isinstance(value, Tensor):
        if value.dtype != torch.int64 or value.numel() != 1:
            raise TypeError(
                f"{op}: {name} must be an int or an int64 tensor of one element, got {value.dtype} "
                f"{tuple(value.shape)}"
            )
        if value.device.type == "meta" and torch.device(device).type != "meta":
            raise ValueError(f"{op}: {name} must have a value, got a tensor on meta")
        return value.to(device)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{op}: {name} must be an int or an int64 tensor of one element, got "
            f"{type(value).__name__}"
        )
    # The device fills the tensor: a copy from the host would synchronize, and a CUDA graph could
    # not capture it.
    return torch.full((), (value + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)
