import inspect

import torch
from torch.utils._pytree import tree_leaves

from fusedseq import _load, kernels, reference
from fusedseq.fused import lstm_cudnn, recurrence_plan

# op: the file of its CPU kernel, and what there is to say of it.
CPU_KERNELS = {
    "activation_regularization": ("csrc/cpu/pointwise.h", "one pass over both outputs"),
    "attention": ("csrc/cpu/attention.h", "blocks of queries against all keys, (B, N, L, S) never in memory"),
    "bias_activation_dropout": ("csrc/cpu/bias_activation_dropout.h", "one pass, the backward from x again"),
    "dropout": ("csrc/cpu/pointwise.h", "the mask made on the way"),
    "dropout_mask": ("csrc/cpu/pointwise.h", "Philox4x32-10"),
    "embedding": ("csrc/cpu/pointwise.h", "the dropout in the gather"),
    "linear": ("csrc/cpu/linear.h", "the recurrences' product"),
    "linear_cross_entropy": ("csrc/cpu/linear_cross_entropy.h", "by blocks of logits"),
    "locked_dropout": ("csrc/cpu/pointwise.h", "one mask for all steps"),
    "lstm": ("csrc/cpu/recurrence.h", "the input's product hoisted out of the time loop"),
    "mogrifier_lstm": ("csrc/cpu/recurrence.h", "the input's product inside the time loop, which gates it"),
    "mogrifier_lstm_pair": ("csrc/cpu/recurrence.h", "two calls of mogrifier_lstm"),
    "residual_layer_norm": ("csrc/cpu/residual_layer_norm.h", "one pass, a row at a time in the cache"),
    "split_cross_entropy": ("csrc/cpu/linear_cross_entropy.h", "the head, and each tail for its own rows"),
    "weight_drop": ("csrc/cpu/pointwise.h", "the mask made on the way"),
}

CUDA_SOURCES = {"locked_dropout": "dropout", "weight_drop": "dropout"}  # where it has not the operator's name

# In the order of AttentionKernel in csrc/cpu/kernels.h.
ATTENTION_KERNELS = [
    ("csrc/cpu/attention.h", "{} queries at a time against all their keys, (B, N, L, S) never in memory"),
    ("csrc/cpu/attention_packed.h", "all keys of a query in one vector, as they are so few"),
    (
        "csrc/cpu/attention_thin.h",
        "few queries: each key and value read once, where it stands (a backward takes attention_backward.h)",
    ),
]

# Operators that call another one.
MADE_OF = {"mogrifier_lstm_pair": "mogrifier_lstm", "split_cross_entropy": "linear_cross_entropy"}


def explain(op, *args, **kwargs):
    """Which kernel a call of an operator runs, and why: one line of text.

    op: a function of `fusedseq.fused`, or its name    args, kwargs: those of the call; without any, a CPU call in fp32
    Errors: ValueError for an unknown operator.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", str(op))
    if name not in CPU_KERNELS:
        raise ValueError(f"explain: op must be one of {', '.join(CPU_KERNELS)}, got {name}")
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    device = tensors[0].device.type if tensors else "cpu"
    floats = [t.dtype for t in tensors if t.is_floating_point()]
    dtype = str(floats[0] if floats else torch.float32).removeprefix("torch.")
    called = MADE_OF.get(name, name)
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device, device)
    if key not in ("CPU", "CUDA") or not torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedseq::{called}", key):
        return f"{name} on {device}: no kernel in this build, the call raises NotImplementedError; fusedseq.reference.{name} runs there"
    if key == "CUDA":
        kernel = f"csrc/{CUDA_SOURCES.get(name, name)}.cu"
        if called in kernels.MODULES:
            kernel = kernels.explain(called, *args, **kwargs)
        elif name == "lstm" and cudnn_takes(*args, **kwargs):
            kernel = "cuDNN's persistent kernel, by torch, for its sizes and float16"
        elif name == "mogrifier_lstm_pair":
            kernel = recurrence_plan.explain_pair(recurrence_plan.this_gpu(tensors[0].device), *args, **kwargs)
        elif name in recurrence_plan.LOOP:
            kernel = recurrence_plan.explain(name, recurrence_plan.this_gpu(tensors[0].device), *args, **kwargs)
        return f"{name} on {device}, {dtype}: {kernel}"
    file, why = CPU_KERNELS[name]
    if name == "mogrifier_lstm" and kwargs.get("rounds") == 0:
        why = CPU_KERNELS["lstm"][1] + ", there being no rounds"
    if name == "attention" and len(tensors) > 1:
        file, why = attention(*args, **kwargs)
    if dtype == "bfloat16" and file.endswith("recurrence.h"):
        why += ", computed and carried in float32"
    if dtype == "bfloat16" and name == "attention":
        why += ", computed in float32"
    if dtype == "float16":
        why += ", its tensors widened to float32 before and narrowed after"
    return f"{name} on cpu, {dtype}: {file}, {_load.isa('used')}, {torch.get_num_threads()} threads; {why}"


def cudnn_takes(*args, **kwargs):
    bound = inspect.signature(reference.lstm).bind(*args, **kwargs)
    bound.apply_defaults()
    x, W_ih, W_hh, b, h0, c0, lengths, weight_drop, _, training, _ = bound.arguments.values()
    return lstm_cudnn.takes(x, W_ih, W_hh, b, h0, c0, lengths, weight_drop if training else 0.0)


def attention(*args, **kwargs):
    """The file of the kernel that a call takes, and why: the kernels' own choice."""
    given = inspect.signature(reference.attention).bind(*args, **kwargs).arguments
    q, k, relative_keys, key_rows = map(given.get, ("q", "k", "relative_keys", "key_rows"))
    kernel, block = torch.ops.fusedseq.attention_plan(q, k, relative_keys, key_rows).tolist()
    file, why = ATTENTION_KERNELS[kernel]
    return file, why.format(block)
