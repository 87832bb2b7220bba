"""Checkpoints: one file holds the whole state of a run.

Tensors are stored in safetensors format, everything else as JSON in its header; there is no pickle.
A file is complete or absent: it is written under a temporary name, flushed to the disk, and then
renamed over the previous one.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import torch

from fusedseq.tasks.training import tensor_file
from fusedseq.tasks.training.errors import CheckpointError, TrainingError
from fusedseq.tasks.training.failures import is_out_of_memory
from fusedseq.tasks.training.files import opened, replaced
from fusedseq.tasks.training.former_names import with_current_description

FORMAT = "fusedseq checkpoint 1"


def save_checkpoint(path: str | Path, state: Any) -> None:
    """Writes a state atomically: at any moment the file at `path` is the previous or the new one.

    The tensors are written one after the other: besides a copy of a tensor that is on a GPU, or not
    contiguous, no further memory is needed.
    state: nested dicts, lists and tuples of tensors and JSON values
    Errors: TrainingError where the file cannot be written
    """
    path = Path(path)
    try:
        tensors: dict[str, torch.Tensor] = {}
        text = json.dumps(_encode(state, "", tensors))
        metadata = {"format": FORMAT, "state": text, "crc32": str(_checksum(text, tensors))}
        with replaced(path, "wb") as file:
            tensor_file.write(file, tensors, metadata)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        memory = is_out_of_memory(error)
        if isinstance(error, RuntimeError) and not memory:
            raise
        why = "out of memory" if memory else error
        previous = "; the previous checkpoint is unchanged" if path.is_file() else ""
        raise TrainingError(f"checkpoint {path} could not be written ({why}){previous}") from error


def load_checkpoint(path: str | Path) -> Any:
    """The state given to `save_checkpoint`, with its tensors on the CPU.

    Errors: CheckpointError where the file is missing, truncated, damaged, or no checkpoint;
        TrainingError where it does not fit into memory
    """
    try:
        return _loaded(path)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} does not exist") from None
    except (OSError, RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise TrainingError(f"out of memory while reading checkpoint {path}") from error
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(f"checkpoint {path} cannot be read ({error})") from None


def _loaded(path: str | Path) -> Any:
    try:
        descriptor = opened(path)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {error}") from None
    try:
        with open(descriptor, "rb") as file:
            tensors, metadata = tensor_file.read(file)
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {path} is truncated or not a checkpoint ({error})"
        ) from None
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {path} must have the format {FORMAT!r}, got {metadata.get('format')!r:.60}"
        )
    if metadata.get("crc32") != str(_checksum(metadata.get("state", ""), tensors)):
        raise CheckpointError(
            f"checkpoint {path} is damaged: its contents do not match its checksum"
        )
    try:
        return with_current_description(_decode(json.loads(metadata["state"]), tensors))
    except RecursionError:
        raise CheckpointError(f"checkpoint {path} is damaged: it is nested too deeply") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged: its state is not one that was saved ({error!r:.100})"
        ) from None


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> int:
    """The CRC-32 of the JSON text and of every tensor's name, dtype, shape and bytes."""
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor_file.contents(tensor), crc)
    return crc


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON; each tensor is put into `tensors` under its dotted path.

    Tensors, tuples, and dicts with other keys than strings become {"": KIND, ...}.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"": "tensor", "name": name}
    if isinstance(value, dict):
        items = [
            [key, _encode(item, f"{name}.{key}" if name else str(key), tensors)]
            for key, item in value.items()
        ]
        if all(isinstance(key, str) for key in value) and "" not in value:
            return dict(items)
        return {"": "dict", "items": items}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"": "tuple", "items": items}
    return value


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `_encode`."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("")
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in value["items"])
    return {
        key: _decode(item, tensors)
        for key, item in (value["items"] if kind == "dict" else value.items())
    }
