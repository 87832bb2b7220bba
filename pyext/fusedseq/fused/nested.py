"""Attention of torch.nested tensors in the jagged layout, which are packed sequences."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedseq import reference

OP = "attention"
# The keyword arguments that `attention` and `attention_varlen` share.
OPTIONS = [
    name
    for name, parameter in inspect.signature(reference.attention_varlen).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
]


def attention(given: Mapping[str, Any]) -> Tensor:
    """Returns `attention` of nested q, k and v as a nested tensor with the sequences of q.

    given: the arguments of `attention` by name
    """
    from fusedseq.fused.attention_varlen import attention_varlen

    q, k, v = (given[name] for name in ("q", "k", "v"))
    t: Any
    for name, t in (("q", q), ("k", k), ("v", v)):
        is_jagged = isinstance(t, Tensor) and t.is_nested and t.layout == torch.jagged
        if not is_jagged or t.dim() != 4 or t._ragged_idx != 2:
            got = f"{t.layout} {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(
                f"{OP}: {name} must be a nested tensor (B, N, L*, D) of layout torch.jagged, as q, "
                f"got {got}"
            )
    for name in ("key_lengths", "offset", "key_rows"):
        if given[name] is not None:
            raise ValueError(f"{OP}: {name} must be None with nested tensors, got one")
    if k.offsets().shape != q.offsets().shape or v.shape != k.shape:
        raise ValueError(
            f"{OP}: q, k and v must be nested tensors of as many sequences, and k and v of the "
            f"same lengths, got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    return nested_as(q.transpose(1, 2), attention_varlen(**packed(given))).transpose(1, 2)


def packed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `attention_varlen` for those of `attention` of nested tensors."""
    q, k, v = (given[name].transpose(1, 2) for name in ("q", "k", "v"))
    return {
        "q": rows(q),
        "k": rows(k),
        "v": rows(v),
        "cu_seqlens_q": offsets(q),
        "cu_seqlens_k": offsets(k),
        "max_seqlen_q": q._maybe_max_seqlen,  # None where the tensor does not know it
        "max_seqlen_k": k._maybe_max_seqlen,
        **{name: given[name] for name in OPTIONS},
    }


def rows(x: Any) -> Tensor:
    """Returns the rows of a nested tensor (B, L*, ...), without holes between the sequences."""
    if x.lengths() is not None:
        x = x.contiguous()
    values: Tensor = x.values()
    return values


def offsets(x: Any) -> Tensor:
    """Returns the boundaries (B + 1,) of the sequences in `rows` of x."""
    lengths = x.lengths()
    found: Tensor = x.offsets() if lengths is None else F.pad(lengths.cumsum(0), (1, 0))
    return found


def nested_as(x: Any, rows: Tensor) -> Tensor:
    """Returns rows as a nested tensor with the sequences of x, without holes between them."""
    made: Tensor = torch.nested.nested_tensor_from_jagged(
        rows, offsets(x), min_seqlen=x._maybe_min_seqlen, max_seqlen=x._maybe_max_seqlen
    )
    return made
