"""The rows and the boundaries of packed sequences: rows with cu_seqlens, or nested tensors."""

from typing import Any

import torch
from torch import Tensor

from fusedseq.fused.nested import nested_as as nested_as
from fusedseq.fused.nested import offsets, rows

MODULE = "MultiheadAttention"
Boundaries = tuple[Tensor, int | None]  # cu_seqlens, and the length of the longest sequence


def boundaries(
    query: Any, key: Any, value: Any, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[Boundaries, Boundaries]:
    """Returns cu_seqlens and the longest sequence of the queries and of the keys."""
    kinds = [isinstance(t, Tensor) and t.is_nested for t in (query, key, value)]
    if cu_seqlens is not None:
        if any(kinds):
            raise ValueError(f"{MODULE}: cu_seqlens must be None with nested tensors, got one")
        return (cu_seqlens, max_seqlen), (cu_seqlens, max_seqlen)
    if not all(kinds):
        raise ValueError(f"{MODULE}: key and value must be nested tensors, as query")
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.layout != torch.jagged or t.dim() != 3 or t._ragged_idx != 1:
            raise ValueError(
                f"{MODULE}: {name} must be a nested tensor (B, L*, E) of layout torch.jagged, got "
                f"{t.layout} {tuple(t.shape)}"
            )
    if key.shape[:2] != value.shape[:2] or key.size(0) != query.size(0):
        raise ValueError(
            f"{MODULE}: query, key and value must be nested tensors of as many sequences, and key "
            f"and value of the same lengths, got {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    first, other = ((offsets(t), t._maybe_max_seqlen) for t in (query, key))
    return first, first if query.shape[1] == key.shape[1] else other


def rows_of(x: Any) -> Any:
    """Returns the rows (rows, E) of a nested tensor, and any other as it is."""
    return rows(x) if isinstance(x, Tensor) and x.is_nested else x


def longest(cu_seqlens: Tensor) -> int:
    """Returns the length of the longest sequence."""
    lengths = cu_seqlens.diff()
    return int(lengths.max()) if lengths.numel() else 0
