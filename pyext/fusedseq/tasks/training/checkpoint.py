"""One file holds a run's whole state: tensors in safetensors format, all else as JSON in its header. No pickle.

A file is complete or absent: it is written under another name, flushed to the disk, and then renamed over the old one.
"""

import json
import os
import zlib
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fusedseq.tasks.training.errors import CheckpointError, TrainingError

FORMAT = "fusedseq checkpoint 1"


def save_checkpoint(path, state):
    """state: dicts, lists, tuples, tensors and JSON's values. The file at `path` is the old or the new one, always."""
    path = Path(path)
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(state, "", tensors))
    metadata = {"format": FORMAT, "state": text, "crc32": str(_checksum(text, tensors))}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:  # safetensors' own save_file leaves a file of another name when killed
            file.write(save(tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        kept = "; the earlier one is kept" if path.exists() else ""
        raise TrainingError(f"checkpoint {path} could not be written ({error}){kept}") from error


def load_checkpoint(path):
    """The state given to `save_checkpoint`, its tensors on the CPU; CheckpointError where the file is not whole."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            # Cloned into torch's own memory, aligned as ever: on an odd address a GEMM may round differently, and a
            # resumed run would not be bit for bit the uninterrupted one.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} does not exist") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} is truncated or no checkpoint at all ({error})") from None
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path} must have the format {FORMAT!r}, got {metadata.get('format')!r}")
    if metadata.get("crc32") != str(_checksum(metadata.get("state", ""), tensors)):
        raise CheckpointError(f"checkpoint {path} is damaged: its contents do not match its checksum")
    return _decode(json.loads(metadata["state"]), tensors)


def _flush_directory(path):
    """So that the renaming itself survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(text, tensors):
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


def _encode(value, name, tensors):
    """`value` as JSON, with each tensor moved to `tensors` under its dotted path."""
    if isinstance(value, torch.Tensor):
        # A clone: safetensors takes no two tensors of one storage, and a row of h is a view.
        tensors[name] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return {"": "tensor", "name": name}
    if isinstance(value, dict):
        items = [[key, _encode(item, f"{name}.{key}" if name else str(key), tensors)] for key, item in value.items()]
        if all(isinstance(key, str) for key in value) and "" not in value:
            return dict(items)
        return {"": "dict", "items": items}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"": "tuple", "items": items}
    return value


def _decode(value, tensors):
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("")
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in value["items"])
    return {key: _decode(item, tensors) for key, item in (value["items"] if kind == "dict" else value.items())}
