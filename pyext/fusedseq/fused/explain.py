from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fusedseq import _load
from fusedseq.fused import autocast, autograd, gru_cudnn
from fusedseq.fused.explain_calls import CALLS, IN_HALF, PRODUCTS, is_with_zoneout
from fusedseq.fused.explain_cpu import CPU_KERNELS, on_cpu
from fusedseq.fused.explain_cuda import is_by_cudnn, on_cuda

UNCAST = ("alibi", "class_weights", "rope")  # arguments of these that autocast leaves as they are
# Operators whose public function calls the oracle for rows of width 0, which no kernel takes.
THROUGH_REFERENCE = ("linear", "residual_layer_norm")


def explain(op: Any, *args: Any, **kwargs: Any) -> str:
    """Returns which kernel a call of an operator runs, and why, in one line of text.

    The dtype in it is the one in which the kernel gets the tensors: where autocast is on, that of
    the call under autocast. Nothing is computed. `explain("dropout")` returns a line such as
    "dropout on cpu, float32: csrc/cpu/pointwise/dropout.h, avx512, 2 threads; the mask computed in
    the same pass".

    op: a function of `fusedseq.fused`, or its name
    args, kwargs: the arguments of the call; without any, a call on the CPU with fp32 tensors
    Errors: ValueError for an unknown operator.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", str(op))
    if name not in CPU_KERNELS:
        raise ValueError(f"explain: op must be one of {', '.join(CPU_KERNELS)}, got {name}")
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    device = tensors[0].device.type if tensors else "cpu"
    args, kwargs = under_autocast(name, device, args, kwargs)
    dtype = dtype_of_call(name, device, args, kwargs)
    if device == "cpu" and dtype == "float16" and name not in IN_HALF:
        return (
            f"{name} on cpu, float16: no kernel, the call raises TypeError; "
            f"fusedseq.reference.{name} runs there"
        )
    if name in THROUGH_REFERENCE and tensors and 0 in tensors[0].shape[-1:]:
        return f"{name} on {device}: fusedseq.reference.{name}, as rows of width 0 need no kernel"
    if device == "cuda" and name in gru_cudnn.OPERATORS and is_by_cudnn(name, args, kwargs):
        return f"{name} on {device}, {dtype}: cuDNN, through torch, in place of the loop"
    called = "mogrifier_lstm" if is_with_zoneout(name, kwargs) else CALLS.get(name, name)
    if name in ("bidirectional_lstm", "projected_lstm") and device != "cpu":
        called = "lstm"
    if not has_kernel(called, device):
        return (
            f"{name} on {device}: no kernel in this build, the call raises NotImplementedError; "
            f"fusedseq.reference.{name} runs there"
        )
    if (called, device) in autograd.switched_off:
        return (
            f"{name} on {device}: fusedseq.reference.{called}, with which its kernels disagreed at "
            "their first use"
        )
    if device == "cuda":
        return f"{name} on {device}, {dtype}: {on_cuda(name, tensors, args, kwargs)}"
    file, how = on_cpu(name, dtype, len(tensors), args, kwargs)
    isa, count = _load.isa("used"), torch.get_num_threads()
    threads = "1 thread" if count == 1 else f"{count} threads"
    return f"{name} on cpu, {dtype}: {file}, {isa}, {threads}; {how}"


def under_autocast(name: str, device: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the arguments of a call in the dtypes to which the public function casts them under
    autocast."""
    if not autocast.is_on(device):
        return args, kwargs
    if name == "residual_layer_norm":
        tensors = autocast.promote(device, *args, *kwargs.values())
        return tensors[: len(args)], dict(zip(kwargs, tensors[len(args) :], strict=True))
    if name not in PRODUCTS:
        return args, kwargs
    kept = {option: kwargs[option] for option in UNCAST if option in kwargs}
    args, cast = tree_map(lambda leaf: autocast.cast(device, leaf)[0], (args, kwargs))
    return args, cast | kept


def dtype_of_call(name: str, device: str, args: Any, kwargs: Any) -> str:
    """Returns the dtype of the first float tensor; without one, that of a call with fp32 tensors.

    args, kwargs: as `under_autocast` returns them
    """
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if not tensors:
        tensors = under_autocast(name, device, (torch.empty(0),), {})[0]
    floats = [t.dtype for t in tensors if t.is_floating_point()]
    return str(floats[0] if floats else torch.float32).removeprefix("torch.")


def has_kernel(op: str, device: str) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(
        f"fusedseq::{op}", key
    )
