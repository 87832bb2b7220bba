"""Tables of measured kernels: which engine a recurrence runs and which tiles attention uses on one
GPU, as `fusedseq tune-kernels` has timed them.

A table is a JSON file. It is read only if FUSEDSEQ_KERNEL_TABLE names it, since otherwise the
result of a call (the order of its sums) would depend on a clock. Without it, arithmetic decides:
csrc/cuda/recurrence/plan.h, kernels/attention/plan.py.

    {
      "format": "fusedseq kernel table 1",
      "gpu": {"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "multiprocessors": 132},
      "recurrences": [
        {"op": "mogrifier_lstm", "dtype": "bfloat16", "B": 20, "X": 650, "H": 650, "rounds": 5,
         "engine": "persistent", "milliseconds": {"loop": ..., "persistent": ...}}
      ],
      "attention": [
        {"D": 64, "options": "plain", "forward": [128, 64, 64, 8, 3], "keys": [32, 128, 64, 8, 2],
         "queries": [64, 64, 64, 8, 2], "milliseconds": {...}}
      ]
    }

The engine "persistent" exchanges vectors between blocks by flags, "persistent words" by words that
carry their own validity. An entry of "mogrifier_lstm_pair" also has "H2" and "rounds2", of the
second layer. "milliseconds" and "T" say what was measured and are not read. The numbers of
"forward", "keys" (the gradients of keys and values) and "queries" (those of queries) are BM, BN,
BD, warps and stages of a tiled kernel, for heads of up to D numbers; an entry has at least one of
the three. "options" are "plain", "dropout" (without those that follow) or "rich" (a bias, a mask, a
rope, relative keys or a softcap). A word after the numbers of "forward" says how it loads keys and
values: "pointers" (the default); "descriptors", by TMA on GPUs from compute capability 9.0 on;
"specialized", these in warps of their own, on 10.x and 11.x. Where a call or its GPU cannot have
what the word says, the kernel loads by pointers or in all warps.
"""

import ctypes
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusedseq import _load, kernels

FORMAT = "fusedseq kernel table 1"
VARIABLE = "FUSEDSEQ_KERNEL_TABLE"
PERSISTENT = {"loop": 1, "persistent": 2, "persistent words": 5}
# {operator: {engine: its number in csrc/ops/engine_table.h}}. cuDNN is not an engine of ours: its
# calls never come to the operator.
ENGINES = {
    "lstm": {**PERSISTENT, "cudnn": 0},
    "mogrifier_lstm": PERSISTENT,
    "mogrifier_lstm_pair": {"wavefront": 3, "in turn": 4},
}
TYPES = {"float32": 0, "bfloat16": 2, "float16": 3}  # csrc/cuda/type.h
SIZES = ("B", "X", "H", "rounds")
OF_SECOND = ("H2", "rounds2")
OPTIONS = ("plain", "dropout", "rich")  # by the numbers of kernels/attention/plan.py
WIDTHS = (64, 128, 256)  # of heads
TILES = ("BM", "BN", "BD", "warps", "stages")
TILED_KERNELS = ("forward", "keys", "queries")  # as kernels/attention/plan.py has them
LOADS = ("pointers", "descriptors", "specialized")  # by the numbers of kernels/attention/plan.py

# The recurrences of the table in use: {(multiprocessors, operator, dtype, *sizes): engine}
engines: dict[tuple[Any, ...], str] = {}
# What the table in use says of lstm: {(capability, dtype, B, X, H): whether cuDNN computes it}
cudnn: dict[tuple[str, int, str, int, int, int], bool] = {}


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    multiprocessors: int

    def __str__(self) -> str:
        return f"{self.name} ({self.capability}, {self.multiprocessors} multiprocessors)"


@dataclass(frozen=True)
class Table:
    """recurrences: {the key of csrc/ops/engine_table.h without the GPU, after the operator's name:
    engine}    attention: {(width, number of the options, kernel): its tiles, and of the forward
    kernel the number of its loads}
    """

    gpu: Gpu
    recurrences: dict[tuple[Any, ...], str] = field(default_factory=dict)
    attention: dict[tuple[int, int, str], tuple[int, ...]] = field(default_factory=dict)


def read(path: str | os.PathLike[str]) -> Table:
    """Reads and checks a table.    Errors: OSError; ValueError that names the file and the entry"""
    try:
        content = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: must be a kernel table in JSON: {error}") from None
    found = content.get("format") if isinstance(content, dict) else content
    if found != FORMAT:
        raise ValueError(f'{path}: must be a kernel table with "format": "{FORMAT}", got {found!r}')
    gpu = Gpu(
        _value(path, "gpu", content.get("gpu"), "name", str),
        _value(path, "gpu", content.get("gpu"), "capability", str),
        _value(path, "gpu", content.get("gpu"), "multiprocessors", int),
    )
    table = Table(gpu)
    for where, entry in _entries(path, content, "recurrences"):
        key, engine = _recurrence(path, where, entry)
        table.recurrences[key] = engine
    for where, entry in _entries(path, content, "attention"):
        table.attention.update(_attention(path, where, entry))
    return table


def _entries(path: Any, content: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    entries = content.get(name, [])
    if not isinstance(entries, list):
        raise ValueError(f"{path}: {name} must be a list, got {entries!r}")
    return [(f"{name}[{i}]", entry) for i, entry in enumerate(entries)]


def _value(path: Any, where: str, entry: Any, name: str, kind: type) -> Any:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = {str: "a text", int: "an integer"}[kind]
        raise ValueError(f"{path}: {where}: {name} must be {wanted}, got {value!r}")
    return value


def _one_of(path: Any, where: str, name: str, value: Any, known: Any) -> Any:
    if value not in known:
        wanted = ", ".join(map(str, known))
        raise ValueError(f"{path}: {where}: {name} must be one of {wanted}, got {value!r}")
    return value


def _recurrence(path: Any, where: str, entry: Any) -> tuple[tuple[Any, ...], str]:
    op = _one_of(path, where, "op", _value(path, where, entry, "op", str), ENGINES)
    dtype = _one_of(path, where, "dtype", _value(path, where, entry, "dtype", str), TYPES)
    engine = _value(path, where, entry, "engine", str)
    _one_of(path, where, "engine", engine, ENGINES[op])
    sizes = []
    for name in (*SIZES, *(OF_SECOND if op == "mogrifier_lstm_pair" else ())):
        size = _value(path, where, entry, name, int)
        if size < ("rounds" not in name):
            least = int("rounds" not in name)
            raise ValueError(f"{path}: {where}: {name} must be at least {least}, got {size}")
        sizes.append(size)
    return (op, dtype, *sizes), engine


def _attention(path: Any, where: str, entry: Any) -> dict[tuple[int, int, str], tuple[int, ...]]:
    """Returns the tiles of an entry as Table.attention has them."""
    width = _one_of(path, where, "D", _value(path, where, entry, "D", int), WIDTHS)
    options = _value(path, where, entry, "options", str)
    number = OPTIONS.index(_one_of(path, where, "options", options, OPTIONS))
    given = [kernel for kernel in TILED_KERNELS if kernel in entry]
    if not given:
        wanted = " or ".join(TILED_KERNELS)
        raise ValueError(f"{path}: {where}: must have {wanted}, got {', '.join(entry)}")
    return {(width, number, kernel): _tiles(path, where, kernel, entry[kernel]) for kernel in given}


def _tiles(path: Any, where: str, kernel: str, value: Any) -> tuple[int, ...]:
    """Returns the tiles of a kernel of an entry."""
    has_loads = kernel == "forward"
    if not isinstance(value, list) or len(value) - len(TILES) not in (0, int(has_loads)):
        wanted = ", ".join(TILES) + f" and perhaps one of {', '.join(LOADS)}" * has_loads
        raise ValueError(f"{path}: {where}: {kernel} must be {wanted}, got {value!r}")
    tiles, loads = value[: len(TILES)], (value[len(TILES) :] or LOADS)[0]
    allowed = ((16, 32, 64, 128, 256),) * 2, ((16, 32, 64, 128), (1, 2, 4, 8, 16), (1, 2, 3, 4, 5))
    for name, size, known in zip(TILES, tiles, (*allowed[0], *allowed[1]), strict=True):
        _one_of(path, where, f"{name} of {kernel}", size, known)
    _one_of(path, where, f"loads of {kernel}", loads, LOADS)
    return (*tiles, LOADS.index(loads)) if has_loads else tuple(tiles)


def keys(table: Table) -> dict[tuple[int, ...], int]:
    """Returns the table's recurrences as csrc/ops/engine_table.h takes them."""
    gpu = table.gpu.multiprocessors, int(table.gpu.capability.replace(".", ""))
    found = {}
    for (op, dtype, *sizes), engine in table.recurrences.items():
        sizes += [0] * (len(SIZES) + len(OF_SECOND) - len(sizes))
        found[(*gpu, TYPES[dtype], *sizes)] = ENGINES[op][engine]
    return found


def use(table: Table) -> None:
    """Lets the operators of this process choose by a table. It holds for the table's GPU alone."""
    _set_engines(keys(table))
    for key, engine in table.recurrences.items():
        engines[(table.gpu.multiprocessors, *key)] = engine
    for (op, dtype, *sizes), engine in table.recurrences.items():
        if op == "lstm":
            place = table.gpu.capability, table.gpu.multiprocessors
            cudnn[(*place, dtype, sizes[0], sizes[1], sizes[2])] = engine == "cudnn"
    kernels.tiles.update(table.attention)
    kernels.tiles_of_gpu = str(table.gpu)


def forget(table: Table) -> None:
    """Removes a table's engines again; cuDNN's and the tiles are the caller's to remove."""
    _set_engines(dict.fromkeys(keys(table), 0))
    for key in table.recurrences:
        engines.pop((table.gpu.multiprocessors, *key), None)


def _set_engines(numbers: dict[tuple[int, ...], int]) -> None:
    set_engine = _load.operators().fusedseq_set_engine
    set_engine.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
    for key, engine in numbers.items():
        set_engine((ctypes.c_int64 * len(key))(*key), engine)


def use_environment() -> None:
    """Uses the table that FUSEDSEQ_KERNEL_TABLE names, if it names one.

    Errors: ValueError that names the variable and the file
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        use(read(path))
    except OSError as error:
        raise ValueError(
            f"{VARIABLE} must name a kernel table, got {path!r}: {error.strerror}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def gpu_of(device: Any) -> Gpu:
    """Returns a CUDA device of this machine as a table names it."""
    import torch

    facts: Any = torch.cuda.get_device_properties(device)
    return Gpu(facts.name, f"{facts.major}.{facts.minor}", facts.multi_processor_count)
