import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fusedseq import _load, kernels, reference
from fusedseq.fused import (
    autocast,
    autograd,
    hidden_state,
    int8_weight,
    lstm_cudnn,
    nested,
    recurrence_plan,
)
from fusedseq.fused.mogrifier_lstm import PROBABILITIES
from fusedseq.fused.projected_lstm import arguments_of_lstm

# {operator: (file of its CPU kernel, how it computes)}
CPU_KERNELS = {
    "activation_regularization": (
        "csrc/cpu/pointwise/activation_regularization.h",
        "one pass over both outputs",
    ),
    "attention": (
        "csrc/cpu/attention/blocks.h",
        "blocks of queries with all their keys, (B, N, L, S) never in memory",
    ),
    "attention_varlen": (
        "csrc/cpu/attention/blocks.h",
        "blocks of queries with the keys of their sequence",
    ),
    "bias_activation_dropout": (
        "csrc/cpu/pointwise/bias_activation_dropout.h",
        "one pass, the backward from x again",
    ),
    "bidirectional_lstm": (
        "csrc/cpu/recurrence/forward.h",
        "the two directions at the same time, each on half of the threads",
    ),
    "dropout": ("csrc/cpu/pointwise/dropout.h", "the mask computed in the same pass"),
    "dropout_mask": ("csrc/cpu/random_mask.h", "Philox4x32-10"),
    "embedding": ("csrc/cpu/pointwise/embedding.h", "the dropout inside the gather"),
    "gru": (
        "csrc/cpu/recurrence/forward.h",
        "the product of the inputs hoisted out of the time loop",
    ),
    "layer_norm_gru": (
        "csrc/cpu/recurrence/forward.h",
        "the product of the inputs hoisted out of the time loop, the norms of a row by one thread",
    ),
    "layer_norm_lstm": (
        "csrc/cpu/recurrence/forward.h",
        "the product of the inputs hoisted out of the time loop, the norms of a row by one thread",
    ),
    "linear": ("csrc/cpu/gemm/linear.h", "the matrix product of the recurrences"),
    "linear_cross_entropy": (
        "csrc/cpu/losses/linear_cross_entropy.h",
        "blocks of logits, never all of them in memory",
    ),
    "locked_dropout": ("csrc/cpu/pointwise/dropout.h", "one mask for all steps"),
    "lstm": (
        "csrc/cpu/recurrence/forward.h",
        "the product of the inputs hoisted out of the time loop",
    ),
    "mogrifier_lstm": (
        "csrc/cpu/recurrence/forward.h",
        "the product of the inputs inside the time loop, because the rounds change x",
    ),
    "mogrifier_lstm_pair": ("csrc/cpu/recurrence/forward.h", "two calls of mogrifier_lstm"),
    "peephole_lstm": (
        "csrc/cpu/recurrence/forward.h",
        "the product of the inputs hoisted out of the time loop",
    ),
    "projected_lstm": (
        "csrc/cpu/recurrence/forward.h",
        "the product of the inputs hoisted out of the time loop, a product with W_hr in each step",
    ),
    "residual_layer_norm": (
        "csrc/cpu/pointwise/residual_layer_norm.h",
        "one pass, one row at a time in the cache",
    ),
    "rnn": (
        "csrc/cpu/recurrence/forward.h",
        "the product of the inputs hoisted out of the time loop",
    ),
    "split_cross_entropy": (
        "csrc/cpu/losses/linear_cross_entropy.h",
        "one loss of the head, and one of each tail for its own rows",
    ),
    "weight_drop": ("csrc/cpu/pointwise/dropout.h", "the mask computed in the same pass"),
}

# The operators with matrix products, which on the CPU may multiply bfloat16 numbers. Autocast casts
# their operands.
PRODUCTS = (
    "attention",
    "attention_varlen",
    "bidirectional_lstm",
    "gru",
    "layer_norm_gru",
    "layer_norm_lstm",
    "linear",
    "linear_cross_entropy",
    "lstm",
    "mogrifier_lstm",
    "mogrifier_lstm_pair",
    "peephole_lstm",
    "projected_lstm",
    "rnn",
    "split_cross_entropy",
)
UNCAST = ("alibi", "class_weights", "rope")  # arguments of these that autocast leaves as they are

BY_PRODUCT = "a call of lstm, whose recurrent weight is the product of W_hh and W_hr"
WITHOUT_ROUNDS = "by the operator mogrifier_lstm without rounds, which has zoneout"

FEW_ROWS = 64  # `linear` of fp32 tensors with at most so many rows is computed in fp32

# The file of csrc/cuda, where it does not have the operator's name.
CUDA_SOURCES = {
    "activation_regularization": "regularization",
    "locked_dropout": "dropout",
    "weight_drop": "dropout",
}

# (file, how it computes), in the order of the enum AttentionKernel in
# csrc/cpu/arguments/attention.h
ATTENTION_KERNELS = [
    (
        "csrc/cpu/attention/blocks.h",
        "{} queries at a time with all their keys, (B, N, L, S) never in memory",
    ),
    ("csrc/cpu/attention/packed.h", "all keys of a query in one vector"),
    (
        "csrc/cpu/attention/thin.h",
        "few queries: each key and value is read once, without being copied",
    ),
]

# Operators whose public function calls the oracle for rows of width 0, which no kernel takes.
THROUGH_REFERENCE = ("linear", "residual_layer_norm")
IN_HALF = ("attention", "attention_varlen", "linear")  # operators that take fp16 on the CPU
# Public functions that call another operator.
CALLS = {
    "attention_varlen": "attention",
    "mogrifier_lstm_pair": "mogrifier_lstm",
    "split_cross_entropy": "linear_cross_entropy",
}


def explain(op: Any, *args: Any, **kwargs: Any) -> str:
    """Returns which kernel a call of an operator runs, and why, in one line of text.

    The dtype in it is the one in which the kernel gets the tensors: where autocast is on, that of
    the call under autocast.

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
    if device == "cuda" and name in hidden_state.BY_CUDNN and is_by_cudnn(name, args, kwargs):
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
    isa, threads = _load.isa("used"), torch.get_num_threads()
    return f"{name} on cpu, {dtype}: {file}, {isa}, {threads} threads; {how}"


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


def on_cuda(name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> str:
    called = CALLS.get(name, name)
    if called in kernels.MODULES:
        return kernels.explain(called, *args, **kwargs)
    if name == "lstm":
        return lstm_on_cuda(*args, **kwargs)
    if name == "bidirectional_lstm":
        forward, reverse = directions_of_call(*args, **kwargs)
        return f"two calls of lstm: {lstm_on_cuda(**forward)}; {lstm_on_cuda(**reverse)}"
    if name == "projected_lstm":
        bound = inspect.signature(reference.projected_lstm).bind(*args, **kwargs)
        bound.apply_defaults()
        return f"{BY_PRODUCT}: {lstm_on_cuda(**arguments_of_lstm(bound.arguments))}"
    if name in recurrence_plan.LOOP_ALONE:
        return recurrence_plan.LOOP_ALONE[name]
    if "lstm" in name or name == "gru":
        gpu = recurrence_plan.this_gpu(tensors[0].device)
        if name == "mogrifier_lstm_pair":
            return recurrence_plan.explain_pair(gpu, *args, **kwargs)
        return recurrence_plan.explain(name, gpu, *args, **kwargs)
    return f"csrc/cuda/{CUDA_SOURCES.get(name, name)}.cu"


def directions_of_call(*args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of the two calls of `lstm` that make up one of `bidirectional_lstm`."""
    bound = inspect.signature(reference.bidirectional_lstm).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reverse = {n.removesuffix("_reverse"): v for n, v in given.items() if n.endswith("_reverse")}
    forward = {n: v for n, v in given.items() if not n.endswith("_reverse")}
    return forward, forward | reverse | {"reverse": True}


def lstm_on_cuda(*args: Any, **kwargs: Any) -> str:
    bound = inspect.signature(reference.lstm).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if lstm_cudnn.is_flipped(given["x"], given["starts"], given["reverse"]):
        return f"a reversed copy of x: {lstm_on_cuda(**{**given, 'reverse': False})}"
    is_zoned = is_with_zoneout("lstm", given)
    if not is_zoned and is_cudnn(given):
        return (
            "cuDNN, through torch: its persistent kernel in float16, for sizes that it supports, "
            "and what would otherwise run the loop over products"
        )
    gpu = recurrence_plan.this_gpu(given["x"].device)
    kernel = recurrence_plan.explain("lstm", gpu, **given)
    return f"{kernel}; {WITHOUT_ROUNDS}" if is_zoned else kernel


def is_with_zoneout(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a call is one of `lstm` with a zoneout, which mogrifier_lstm computes."""
    return name == "lstm" and bool(given.get("zoneout_h") or given.get("zoneout_c"))


def is_by_cudnn(name: str, args: Any, kwargs: Any) -> bool:
    """Whether cuDNN computes a call of `gru` or `rnn`."""
    given = inspect.signature(getattr(reference, name)).bind(*args, **kwargs).arguments
    return hidden_state.is_by_cudnn(name, **given)


def on_cpu(
    name: str, dtype: str, num_tensors: int, args: Any, kwargs: dict[str, Any]
) -> tuple[str, str]:
    """Returns the file of the kernel, and how it computes."""
    file, how = CPU_KERNELS[name]
    if by := in_8_bits(name, args, kwargs):
        return by
    if name == "bidirectional_lstm":
        if any(int8_weight.parts(W) for W in tree_leaves((args, kwargs))):
            how = "two calls of lstm, because weights are in 8 bits"
        elif torch.get_num_threads() % 2:
            how = "one direction after the other, because the number of threads is odd"
    if name == "mogrifier_lstm" and kwargs.get("rounds") == 0:
        how = CPU_KERNELS["lstm"][1] + ", because there are no rounds"
    if is_with_zoneout(name, kwargs):
        how += f", {WITHOUT_ROUNDS}"
    if CALLS.get(name, name) == "attention" and num_tensors > 1:
        file, how = attention(getattr(reference, name), *args, **kwargs)
    # The attention of few queries reads its keys and values once, and multiplies in float32.
    exact = file == ATTENTION_KERNELS[-1][0]
    if name in PRODUCTS and not exact and multiplies_in_bf16(name, dtype, args, kwargs):
        how += ", the operands of products multiplied as bfloat16 numbers, all else in float32"
    elif dtype == "bfloat16" and name in PRODUCTS:
        how += ", computed in float32"
    if dtype == "float16" and name in IN_HALF:
        how += ", its tensors converted to float32 and back"
    return file, how


def in_8_bits(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Returns how a call multiplies weights in 8 bits without converting them first, or None."""
    if not any(int8_weight.parts(W) for W in tree_leaves((args, kwargs))):
        return None
    file = CPU_KERNELS[name][0]
    given = inspect.signature(getattr(reference, name)).bind(*args, **kwargs).arguments
    x = given["x"]
    if name == "linear":
        has_kernel = int8_weight.has_product(x, given.get("b"))
        file = "csrc/cpu/gemm/linear_int8.h"
    elif not hasattr(torch.ops.fusedseq, f"{name}_int8"):
        return None
    else:
        weights = tree_leaves([given.get(n) for n in ("W_ih", "W_hh", "Q", "R")])
        others = [t for t in tree_leaves(given) if type(t) is torch.Tensor]
        is_random = given.get("training", True) and any(given.get(n) for n in PROBABILITIES)
        has_kernel = int8_weight.has_recurrence(x, weights, others, is_random)
    how = "the weights read as numbers of 8 bits"
    if _load.multiplies_bytes():
        how += ", and few rows as three digits of 8 bits for each number"
    return (file, how) if has_kernel else None


def multiplies_in_bf16(name: str, dtype: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the products of a call on the CPU multiply bfloat16 numbers: see csrc/ops/precision.h
    and, for `linear` of few rows, csrc/ops/linear.cpp."""
    if not _load.multiplies_bf16():
        return False
    if dtype == "bfloat16":
        return True
    reduced = torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]
    if dtype != "float32" or not reduced:
        return False
    x = args[0] if args else kwargs.get("x")
    rows = None if x is None else x.numel() // max(1, x.size(-1))
    return name != "linear" or rows is None or rows > FEW_ROWS


def is_cudnn(given: Mapping[str, Any]) -> bool:
    """Whether cuDNN computes a call of `lstm`. given: all of its arguments by name"""
    names = inspect.signature(lstm_cudnn.supports).parameters
    call = {name: given[name] for name in names}
    if not given["training"]:
        call["weight_drop"] = 0.0
    return lstm_cudnn.supports(**call)


def attention(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Returns the file of the CPU kernel that a call runs, and how that kernel computes, as the
    kernels themselves choose."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["q"].is_nested:
        return attention(reference.attention_varlen, **nested.packed(given))
    q, k, key_rows, offset = given["q"], given["k"], given.get("key_rows"), given.get("offset")
    cu_seqlens: list[Any] = [given.get("cu_seqlens_q"), given.get("cu_seqlens_k")]
    longest = [0, 0]
    if function is reference.attention_varlen:
        q, k = (t.transpose(0, 1).unsqueeze(0) for t in (q, k))
        cu_seqlens = [cu.long() for cu in cu_seqlens]
        longest = [max(cu.diff().tolist(), default=0) for cu in cu_seqlens]
        offset = 0
    if offset is None:
        offset = (k.size(2) if key_rows is None else key_rows.size(1)) - q.size(2)
    left, right = (-1 if n is None else n for n in given["window"] or (-1, -1))
    kernel, block = torch.ops.fusedseq.attention_plan(
        *(q, k, given["relative_keys"], key_rows, given["causal"], offset, given["sinks"]),
        *(given["softcap"], left, right, *cu_seqlens, *longest),
    ).tolist()
    file, why = ATTENTION_KERNELS[kernel]
    return file, why.format(block)
