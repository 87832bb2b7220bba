from typing import Any

import torch
from torch import Tensor

from fusedseq.fused import attention_checks, autocast, autograd, check
from fusedseq.fused.attention import DTYPES
from fusedseq.fused.schema import Named

OP = "attention_varlen"


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi: Tensor | None = None,
    relative_keys: Tensor | None = None,
    rope: Tensor | None = None,
    rope_interleaved: bool = True,
    dropout: float = 0.0,
    seed: int | Tensor = 0,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes `fusedseq.reference.attention_varlen` without padding and without a mask in memory:
    a call of the registered operator `attention`. Threads share the work, not the sequences.

    max_seqlen_q and max_seqlen_k must be given in compiled code and while a CUDA graph is captured;
    where they are not given, the longest sequences are read from cu_seqlens, which waits for a GPU.
    Compiled code is compiled for each of their values, so give it one bound for all calls.

    Errors: those of `attention`; ValueError for cu_seqlens that do not rise from 0 to the number of
    rows or have a sequence longer than max_seqlen, and for a sequence with fewer keys than queries
    with rope. On a GPU the values of cu_seqlens are checked only where max_seqlen is not given.
    """
    check.tensor(OP, "q", q)
    q, k, v, bias, relative_keys, sinks = autocast.cast(
        q.device.type, q, k, v, bias, relative_keys, sinks
    )
    others = {"k": k, "v": v, "bias": bias, "relative_keys": relative_keys, "sinks": sinks}
    check.like(OP, q, "q", ("bias", "relative_keys", "sinks"), dtypes=DTYPES, **others)
    for name, t, symbols in (
        ("q", q, "(queries, N, D)"),
        ("k", k, "(keys, N_kv, D)"),
        ("v", v, "(keys, N_kv, D)"),
    ):
        check.dimensions(OP, name, t, symbols)
    cu_seqlens_q, max_seqlen_q = boundaries("q", cu_seqlens_q, max_seqlen_q, q)
    cu_seqlens_k, max_seqlen_k = boundaries("k", cu_seqlens_k, max_seqlen_k, k)
    B = cu_seqlens_q.size(0) - 1
    check.shape(OP, "cu_seqlens_k", cu_seqlens_k, "(B + 1,)", (B + 1,))
    (_, N, D), (keys, N_kv, D_of_k) = q.shape, k.shape
    if D_of_k != D or (N % N_kv if N_kv else N):
        raise ValueError(
            f"{OP}: k must be (keys, N_kv, D) with D = {D} and an N_kv that divides N = {N}, got "
            f"{tuple(k.shape)}"
        )
    check.shape(OP, "v", v, "(keys, N_kv, D)", (keys, N_kv, D))
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))  # (1, N, rows, D)
    attention_checks.shapes(q, k, v, None)
    known = rope is not None and check.is_readable(cu_seqlens_q)
    if known and (cu_seqlens_q.diff() > cu_seqlens_k.diff()).any():
        raise ValueError(
            f"{OP}: every sequence must have at least as many keys as queries with rope, got one "
            "with fewer"
        )
    given: Named = {
        "q": q,
        "k": k,
        "v": v,
        "scale": scale,
        "causal": causal,
        "key_lengths": None,
        "mask": mask,
        "bias": bias,
        "alibi": alibi,
        "relative_keys": relative_keys,
        "rope": rope,
        "rope_interleaved": rope_interleaved,
        "offset": 0,
        "key_rows": None,
        "dropout": dropout,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    sizes = (B, q.size(1), max_seqlen_q, max_seqlen_k)
    named = given | attention_checks.terms(q, sizes, 0, given) | attention_checks.settings(q, given)
    tensor_seed = check.seed(OP, seed, q.device)
    named["seed"] = tensor_seed if named["dropout"] else None
    out: Tensor = autograd.call_by_name("attention", named)[0]
    return out.squeeze(0).transpose(0, 1)


def boundaries(letter: str, cu_seqlens: Any, longest: Any, x: Tensor) -> tuple[Tensor, int]:
    """Returns cu_seqlens as int64 and the length of the longest sequence; checks both.

    letter: of the argument    x: the rows of the sequences
    """
    if longest is None and (torch.compiler.is_compiling() or x.is_meta):
        raise ValueError(
            f"{OP}: max_seqlen_{letter} must be given in compiled code and for meta tensors, got "
            "None"
        )
    offsets = check.offsets(
        OP, f"cu_seqlens_{letter}", cu_seqlens, x, letter, reads=longest is None
    )
    return offsets, check.longest(OP, f"max_seqlen_{letter}", longest, offsets)
