"""The checks at the door: in one sentence who, what, wanted, got. Past the door nobody checks again."""

import torch

CPU = {"cpu": (torch.float32, torch.float64, torch.bfloat16)}
DTYPES = {**CPU, "cuda": (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
# Of the operators whose CUDA kernels are Triton's.
TRITON = {**CPU, "cuda": (torch.float32, torch.bfloat16, torch.float16)}


def tensor(op, name, value):
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")


def like(op, first, first_name, optional=(), dtypes=DTYPES, **others):
    """Every tensor on the device and of the dtype of the first, whose dtype the device's kernels take.

    optional: the names that may be None    dtypes: {device type: those of its kernels}
    """
    tensor(op, first_name, first)
    known = dtypes.get(first.device.type)
    if not first.is_floating_point() or (known and first.dtype not in known):
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in known or (torch.float32,))
        raise TypeError(f"{op}: {first_name} must be {wanted} on {first.device.type}, got {first.dtype}")
    for name, value in others.items():
        if value is None and name in optional:
            continue
        tensor(op, name, value)
        if value.dtype != first.dtype:
            raise TypeError(f"{op}: {name} must be of the dtype of {first_name}, {first.dtype}, got {value.dtype}")
        if value.device != first.device:
            raise ValueError(f"{op}: {name} must be on the device of {first_name}, {first.device}, got {value.device}")


def shape(op, name, value, symbols, wanted):
    """`shape("lstm", "W_hh", W_hh, "(4H, H)", (16, 4))`"""
    if tuple(value.shape) != tuple(wanted):
        raise ValueError(f"{op}: {name} must be {symbols} = {tuple(wanted)}, got {tuple(value.shape)}")


def dimensions(op, name, value, symbols):
    """As many dimensions as `symbols`, e.g. "(T, B, X)", names."""
    if value.dim() != symbols.count(",") + 1 - symbols.count(",)"):
        raise ValueError(f"{op}: {name} must be {symbols}, got {tuple(value.shape)}")


def probability(op, name, p):
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: {name} must be in [0, 1], got {p}")


def whole_numbers(op, name, value, low, high, symbols, error=ValueError):
    """int64 values in [low, high]. Compiled code and other devices leave the values to the kernel, which must not wait."""
    tensor(op, name, value)
    if value.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be int64, got {value.dtype}")
    if torch.compiler.is_compiling() or value.device.type != "cpu" or value.numel() == 0:
        return
    least, most = (int(v) for v in value.aminmax())
    if least < low or most > high:
        raise error(f"{op}: {name} must be in {symbols}, got {least if least < low else most}")


def classes(op, name, value, V, ignore_index):
    """int64 class numbers in [0, V), or ignore_index; as `whole_numbers`, but for ignore_index anywhere."""
    tensor(op, name, value)
    if value.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be int64, got {value.dtype}")
    if torch.compiler.is_compiling() or value.device.type != "cpu" or value.numel() == 0:
        return
    least, most = value.aminmax()
    if least >= 0 and most < V:
        return
    wrong = ((value < 0) | (value >= V)) & (value != ignore_index)
    if wrong.any():
        raise IndexError(f"{op}: {name} must be in [0, V) = [0, {V}) or ignore_index = {ignore_index}, got "
                         f"{value[wrong][0]}")  # fmt: skip


def seed(op, value, device):
    """The seed, any 64-bit integer or an int64 tensor of one element, as the tensor that the operators take."""
    if isinstance(value, torch.Tensor):
        if value.dtype != torch.int64 or value.numel() != 1:
            raise TypeError(f"{op}: seed must be an int or an int64 tensor of one element, got {value.dtype} "
                            f"{tuple(value.shape)}")  # fmt: skip
        return value.to(device)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: seed must be an int or an int64 tensor of one element, got {type(value).__name__}")
    # Filled there, not copied: a copy from the host waits for the device, and no CUDA graph can hold it.
    return torch.full((), (value + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)
