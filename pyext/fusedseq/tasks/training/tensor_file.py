"""Reads and writes safetensors files, tensor by tensor.

The library of that name builds the whole file in memory before it writes it, aborts where that
memory is not available, and maps a file into memory to read it, which ends the process by a signal
where another process shortens the file meanwhile. Here no memory is needed besides the tensors.

A file consists of the header's length, 8 bytes, little-endian; the header, JSON {tensor's name:
{"dtype", "shape", "data_offsets": [begin, end]}} with "__metadata__": {text: text}; and the bytes
of the tensors without gaps, to which the offsets refer.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from typing import IO, Any

import torch

LENGTH = struct.Struct("<Q")  # the header's length
LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
METADATA = "__metadata__"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def contents(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor; a tensor that is contiguous and on the CPU is not copied."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def write(file: IO[bytes], tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes a file. Errors: OSError; ValueError where the header is too long"""
    # The widest dtypes first, so that every tensor is aligned in the file.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {METADATA: metadata}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise ValueError(
            f"the part that is not tensors must have at most {LONGEST_HEADER:,} bytes, "
            f"got {len(text):,}"
        )
    file.write(LENGTH.pack(len(text)))
    file.write(text)
    for name in names:
        file.write(contents(tensors[name]))


def read(file: IO[bytes]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, in memory that torch allocates, and its metadata.

    No tensor is allocated before every shape has been compared with the length of the file.
    Errors: ValueError where the file is truncated or not of this format; OSError
    """
    rest = os.fstat(file.fileno()).st_size - LENGTH.size
    if rest < 0:
        raise ValueError("it has no header")
    (length,) = LENGTH.unpack(_exactly(file, LENGTH.size))
    if length > min(rest, LONGEST_HEADER):
        raise ValueError(f"its header of {length:,} bytes is too long")
    try:
        header = json.loads(_exactly(file, length))
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata are not texts")
    entries = sorted((_entry(name, entry) for name, entry in header.items()), key=lambda e: e[3:])
    end = 0
    for name, _, _, begin, stop in entries:
        if begin != end:
            raise ValueError(f"its tensor {name[:60]!r} begins at {begin}, not at {end}")
        end = stop
    if end != rest - length:
        raise ValueError(f"it must have {end:,} bytes of tensors, got {rest - length:,}")
    return {name: _tensor(file, dtype, shape) for name, dtype, shape, _, _ in entries}, metadata


def _entry(name: str, entry: Any) -> tuple[str, torch.dtype, list[int], int, int]:
    """(name, dtype, shape, begin, end) of an entry of the header."""
    try:
        dtype, shape, (begin, end) = (entry[key] for key in ("dtype", "shape", "data_offsets"))
        counts = [*shape, begin, end]
        if any(type(n) is not int or n < 0 for n in counts):
            raise ValueError("a size or an offset is not a natural number")
        kind = DTYPES[dtype]
        if math.prod(shape) * kind.itemsize != end - begin:
            raise ValueError(f"{end - begin:,} bytes for {dtype} of shape {shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its tensor {name[:60]!r} is not described: {error!r:.100}") from None
    return name, kind, shape, begin, end


def _tensor(file: IO[bytes], dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    # Memory that torch allocates is aligned. A GEMM may round differently on an unaligned address,
    # and a resumed run would then differ from the uninterrupted one.
    tensor = torch.empty(shape, dtype=dtype)
    into = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    while into:
        if not (n := file.readinto(into)):  # type: ignore[attr-defined]
            raise ValueError("it ends within a tensor")
        into = into[n:]
    return tensor


def _exactly(file: IO[bytes], n: int) -> bytes:
    found = file.read(n)
    if len(found) < n:
        raise ValueError("it ends within its header")
    return found
