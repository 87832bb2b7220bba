"""Which kernel a call runs on the CPU, for `explain`."""

import inspect
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fusedseq import _load, reference
from fusedseq.fused import int8_weight, nested
from fusedseq.fused.explain_calls import CALLS, IN_HALF, PRODUCTS, WITHOUT_ROUNDS, is_with_zoneout
from fusedseq.fused.mogrifier_lstm import PROBABILITIES

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
        "chunks of logits, of at most some 160 MiB",
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
# (file, how it computes), in the order of the enum AttentionKernel in
# csrc/cpu/arguments/attention.h
ATTENTION_KERNELS = [
    (
        "csrc/cpu/attention/blocks.h",
        "{} queries at a time with all their keys, (B, N, L, S) never in memory",
    ),
    ("csrc/cpu/attention/packed.h", "all keys of a query in one vector"),
    (
        "csrc/cpu/attention/few_queries.h",
        "few queries: each key and value is read once, without being copied",
    ),
]
FEW_ROWS = 64  # `linear` of fp32 tensors with at most so many rows is computed in fp32


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
