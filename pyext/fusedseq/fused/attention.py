from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fusedseq import reference
from fusedseq.fused import attention_checks, autocast, autograd, check, nested
from fusedseq.fused.gradient import Gradient, call_backward
from fusedseq.fused.schema import Gradients, Named, Schema
from fusedseq.fused.through_oracle import call_reference
from fusedseq.fused.transforms import is_transformed

OP = "attention"
PLAIN = "attention_plain"  # without options, on the CPU: csrc/python/_autograd.cpp calls it
DTYPES = {**check.TRITON, "cpu": (*check.DTYPES["cpu"], torch.float16)}
# The operator's inputs of a call without options, but for q, k, v and scale.
NO_OPTIONS: Named = {
    **dict.fromkeys(Schema(OP).tensors),
    "rope_interleaved": True,
    "causal": False,
    "offset": 0,
    "dropout": 0.0,
    "softcap": 0.0,
    "window_left": -1,
    "window_right": -1,
    "max_seqlen_q": 0,
    "max_seqlen_k": 0,
}
# The inputs of packed sequences, in a call of others.
UNPACKED: Named = {"cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0}
# The operator's `offset` that stands for S - L: see csrc/ops/attention_call.h.
AT_END = -(2**63)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_lengths: Tensor | Sequence[int] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    relative_keys: Tensor | None = None,
    rope: Tensor | None = None,
    rope_interleaved: bool = True,
    offset: int | None = None,
    key_rows: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor = 0,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes `fusedseq.reference.attention` without a (B, N, L, S) tensor in memory, forward and
    backward: of the probabilities only their log-sum-exp is saved.

    q, k and v may have any strides, if that of the last dimension is 1: they may be views of one
    projection. The result is stored as (B, L, N, D), so that flattening it for the next projection
    copies nothing.

    With a window, blocks of keys that no query of a block sees are skipped: the time grows with
    L * window. q, k and v may be torch.nested tensors in the jagged layout, (B, N, L*, D) and
    (B, N_kv, S*, D), as torch's scaled_dot_product_attention takes them: the call is
    `attention_varlen` then, which has no key_lengths, offset and key_rows, and the result is nested
    as q.

    Keys and values past key_lengths are never read: they may be uninitialized memory. Other
    masked keys, masked by `mask` or by causality, must be finite, as their probability 0 times inf
    or NaN is NaN. (The oracle requires this of all keys.)

    Autocast casts q, k, v, bias, relative_keys and sinks to its dtype; alibi and rope may be fp32
    beside any dtype. Sums are accumulated in fp32 (fp64 for fp64), in an order that depends only on
    the shapes: on the CPU a result does not depend on the number of threads.

    Errors: ValueError or TypeError naming the argument, for a wrong shape or device, D above 2048,
    a dtype other than fp32, bf16, fp16 and (CPU) fp64, key_lengths outside [0, S], a table of rope
    that is too short or whose width R is odd or above D, key_rows outside k, a window that is not
    two numbers of at least -1 or None, or a softcap below 0; RuntimeError for
    gradients with key_rows, which is for inference only.
    """
    has_no_terms = key_lengths is mask is bias is alibi is relative_keys is rope is key_rows is None
    if (
        has_no_terms
        and window is None
        and sinks is None
        and softcap == 0
        and offset is None
        and causal is False
        and type(rope_interleaved) is bool
        and dropout == 0
        and type(seed) is int
        and (scale is None or type(scale) is float)
        and not is_compiling()
    ):
        in_cpp = autograd.recorder
        fast_path = in_cpp.attention_without_options if in_cpp else attention_without_options
        try:
            out: Tensor = fast_path(q, k, v, scale)
            if out is not NotImplemented:
                return out
        except autograd.SwitchedOff:
            pass
    given: Named = {
        "q": q,
        "k": k,
        "v": v,
        "scale": scale,
        "causal": causal,
        "key_lengths": key_lengths,
        "mask": mask,
        "bias": bias,
        "alibi": alibi,
        "relative_keys": relative_keys,
        "rope": rope,
        "rope_interleaved": rope_interleaved,
        "offset": offset,
        "key_rows": key_rows,
        "dropout": dropout,
        "seed": seed,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
    }
    check.tensor(OP, "q", q)
    if q.is_nested:
        return nested.attention(given)
    out = autograd.call_by_name(OP, given | UNPACKED | inputs(given))[0]
    return out


def inputs(given: Named) -> Named:
    """Checks the arguments of `attention`; returns the operator's inputs that differ from them."""
    q, key_rows, key_lengths = given["q"], given["key_rows"], given["key_lengths"]
    names = "q", "k", "v", "bias", "relative_keys", "sinks"  # which have one dtype
    cast = autocast.cast(q.device.type, *(given[name] for name in names))
    named: Named = dict(zip(names, cast, strict=True))
    q, k, v = cast[:3]
    others = {name: named[name] for name in names[1:]}
    check.like(OP, q, "q", ("bias", "relative_keys", "sinks"), dtypes=DTYPES, **others)
    S = attention_checks.shapes(q, k, v, key_rows)
    if key_rows is not None:
        named["key_rows"] = check.int64(key_rows)
        attention_checks.key_rows(named["key_rows"], q, k, S)
        attention_checks.no_gradients(*cast)
    position = S - q.size(2) if given["offset"] is None else given["offset"]  # of the first query
    attention_checks.offset(position)
    named["offset"] = AT_END if given["offset"] is None else given["offset"]
    if key_lengths is not None:
        named["key_lengths"] = check.lengths(
            OP, "key_lengths", key_lengths, q, "q", q.size(0), S, "S"
        )
    sizes = (q.size(0), q.size(1), q.size(2), S)
    named |= attention_checks.terms(q, sizes, position, given | named)
    named |= attention_checks.settings(q, given)
    tensor_seed = check.seed(OP, given["seed"], q.device)
    named["seed"] = tensor_seed if named["dropout"] else None
    return named


autograd.restarting.add(attention.__code__)


def attention_without_options(q: Any, k: Any, v: Any, scale: float | None) -> Any:
    """The fast path of a call without options, whose checks would take a fifth of the time of a
    small call. Returns NotImplemented unless q, k and v are known to be valid.
    csrc/python/_autograd.cpp has the same in C++, which on the CPU calls `attention_plain`.
    """
    if is_transformed() or not is_attention(q, k, v):
        return NotImplemented
    scale = q.size(3) ** -0.5 if scale is None else scale
    return autograd.call_by_name(OP, NO_OPTIONS | {"q": q, "k": k, "v": v, "scale": scale})[0]


def is_attention(q: Any, k: Any, v: Any) -> bool:
    """Returns whether q, k and v are known to be valid arguments of a call without options."""
    if not type(q) is type(k) is type(v) is Tensor:
        return False
    shape, device, dtype = q.shape, q.device, q.dtype
    if not q.dim() == k.dim() == 4 or k.shape != v.shape or not dtype is k.dtype is v.dtype:
        return False
    if not device == k.device == v.device or torch.is_autocast_enabled(device.type):
        return False
    if 0 in shape[1:] or 0 in k.shape[1:] or shape[3] > attention_checks.MAX_HEAD_DIM:
        return False
    if shape[0] != k.size(0) or shape[1] % k.size(1) or shape[3] != k.size(3):
        return False
    return dtype in DTYPES.get(device.type, ())


def heads_last(like: Tensor, B: int, N: int, L: int, D: int) -> Tensor:
    """A new (B, N, L, D) tensor that is stored as (B, L, N, D)."""
    return like.new_empty(B, L, N, D).transpose(1, 2)


def fake(named: Named) -> tuple[Tensor, Tensor]:
    q, cu_seqlens_q = named["q"], named["cu_seqlens_q"]
    B, N, L, D = q.shape
    computing = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = heads_last(q, B, N, L, D)
    if cu_seqlens_q is not None:
        B, L = cu_seqlens_q.size(0) - 1, named["max_seqlen_q"]
    return out, q.new_empty(B, N, L, dtype=computing)


def new_gradient(named: Named, name: str) -> Tensor:
    q, like = named["q"], named[name]
    return heads_last(q, *like.shape) if name in ("q", "k", "v") else q.new_empty(like.shape)


# Bits of `needs` beside those of the gradients, by the number of inputs: csrc/ops/attention.cpp.
TOGETHER = {3: 1 << 6, 2: 1 << 7}


def shared_projection(q: Tensor, k: Tensor, v: Tensor, needed: frozenset[str]) -> int:
    """Returns a bit of `needs` if q, k and v, or k and v, are the (B, N, L, D) views that together
    make up one projection, else 0.

    Their gradients are then laid out as the projection's gradient, so that autograd need not copy
    them into one tensor.
    """
    # Under a dispatch mode, as tracing sets one, torch forbids results that share memory.
    has_mode = torch._C._len_torch_dispatch_stack() > 0
    if has_mode or not {"k", "v"} <= needed or not type(q) is type(k) is type(v) is Tensor:
        return 0
    parts = (q, k, v) if "q" in needed and q.shape == k.shape and are_adjacent(q, k) else (k, v)
    B, N, S, D = k.shape
    row = len(parts) * N * D
    is_whole = k.stride() in ((S * row, D, row, 1), (row, D, B * row, 1))
    return TOGETHER[len(parts)] if is_whole and are_adjacent(k, v) else 0


def are_adjacent(a: Tensor, b: Tensor) -> bool:
    """Returns whether each row of b follows the row of a in memory."""
    width = a.size(1) * a.size(3) * a.element_size()
    return a.stride() == b.stride() and b.data_ptr() == a.data_ptr() + width


def gradient(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
    bits = shared_projection(named["q"], named["k"], named["v"], needed)
    return call_backward("attention_backward", named, grads, needed, bits)


def oracle(named: Named) -> Tensor:
    named = named | {"window": (named["window_left"], named["window_right"])}
    named["offset"] = None if named["offset"] == AT_END else named["offset"]
    if named["cu_seqlens_q"] is None:
        return call_reference(reference.attention, named)  # type: ignore[no-any-return]
    rows = {name: named[name].squeeze(0).transpose(0, 1) for name in ("q", "k", "v")}
    out = call_reference(reference.attention_varlen, named | rows)
    return out.transpose(0, 1).unsqueeze(0)  # type: ignore[no-any-return]


autograd.register(
    OP,
    fake,
    Gradient(results=("out",), backwards=("attention_backward",), oracle=oracle, compute=gradient),
)
autograd.register_fake_backward(OP, new_gradient)


def plain_gradient(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
    bits = shared_projection(named["q"], named["k"], named["v"], needed)
    return call_backward(f"{PLAIN}_backward", named, grads, needed, bits)


def plain_oracle(named: Named) -> Tensor:
    return call_reference(reference.attention, named)  # type: ignore[no-any-return]


autograd.register(
    PLAIN,
    lambda named: fake(named | {"cu_seqlens_q": None}),
    Gradient(
        results=("out",),
        backwards=(f"{PLAIN}_backward",),
        oracle=plain_oracle,
        compute=plain_gradient,
    ),
)
autograd.register_fake_backward(PLAIN, new_gradient)
