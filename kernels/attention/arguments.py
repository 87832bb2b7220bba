"""Defines the arguments that all attention kernels receive, and finds rows and keys by them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Kernel parameters for which Triton compiles one kernel for every value (do_not_specialize).
UNSPECIALIZED_SIZES = ["N", "L", "S", "offset", "threshold"]
UNSPECIALIZED_HEADS = ["dq_heads", "dk_heads"]


class OptionalTensors(NamedTuple):
    """The optional tensors of a call. What is None is compiled away and costs nothing."""

    bias: Any = None  # (B, N, L, S), added to the logits
    bias_strides: Any = None  # of its four dimensions; 0 where it is broadcast
    mask: Any = None  # (B, N, L, S) bool, false: the key is hidden from the query
    mask_strides: Any = None  # as bias_strides
    alignment: Any = None  # power of two that divides S and the first element of each row of both
    key_lengths: Any = None  # (B,) int64
    alibi: Any = None  # (N,) slopes
    relative: Any = None  # (B, N, L, 2 clip + 1), q_i . relative_keys of each distance
    clip: Any = None  # distances beyond +-clip count as +-clip
    rope: Any = None  # tile.Rope
    key_rows: Any = None  # (B, S) int64, the batch row of k and v that holds key j
    seed: Any = None  # (1,) int64, of the dropout mask; None: no dropout
    # The next ones are of the tiled kernels alone.
    window_left: Any = None  # a query at position p sees keys p - left to p + right; or both None
    window_right: Any = None
    softcap: Any = None
    sinks: Any = None  # (N,)
    cu_seqlens_q: Any = None  # (B + 1,) int64: packed sequences, which have their own L, S, offset
    cu_seqlens_k: Any = None  # (B + 1,) int64
    longest_q: Any = None  # L and S of the longest sequences, which are those of lse and the masks
    longest_k: Any = None


class Sizes(NamedTuple):
    """The scalars that every attention kernel receives, in the order of the kernels' parameters."""

    N: Any  # heads of q
    L: Any  # queries
    S: Any  # keys
    offset: Any  # position of query 0, where key 0 has position 0
    threshold: Any  # of dropout, see philox.threshold
    scale: Any  # of q k^T
    keep_scale: Any  # factor of the probabilities that dropout keeps
    group: Any  # query heads that share a head of k and v: N / N_kv


class Config(NamedTuple):
    """The compile-time arguments that every attention kernel receives."""

    D: Any  # columns of a head
    BD: Any  # columns of a tile of a head; D is processed in ceil(D / BD) chunks
    BM: Any  # queries of a tile
    BN: Any  # keys of a tile
    CAUSAL: Any
    PRECISION: Any  # of tl.dot in fp32: "ieee" or "tf32"
    BYTES: Any  # power of two that divides the address of each row of the inputs
    SPECIALIZED: Any = False  # whether warps of their own load, of the tiled forward kernel alone


@triton.jit
def end_of_keys(optional, b, S):
    """Returns the number of keys of batch row b. Keys behind it may be NaN: they are not loaded."""
    if optional.key_lengths is None:
        return S
    else:
        return tl.minimum(S, tl.load(optional.key_lengths + b).to(tl.int32))


@triton.jit
def batch_row_of_keys(optional, b, j, inside, S):
    """Returns the batch row of k and v that holds the keys j of batch row b."""
    if optional.key_rows is None:
        return b
    else:
        return tl.load(optional.key_rows + b.to(tl.int64) * S + j, mask=inside, other=0)


@triton.jit
def query_row(b, n, i, sizes, optional):
    """Returns the row of query i among the (B, N, L) rows of lse, relative and the dropout mask."""
    if optional.cu_seqlens_q is None:
        return (b.to(tl.int64) * sizes.N + n) * sizes.L + i
    else:
        return (b.to(tl.int64) * sizes.N + n) * optional.longest_q + i


@triton.jit
def sequence(optional, b):
    """Returns the first query and the first key of packed sequence b among all rows, its numbers of
    queries and keys, and the position of its first query. Of a sequence that is longer than the
    caller says the longest one is, the rest counts as absent: lse and the masks have no rows for
    it."""
    first_q = tl.load(optional.cu_seqlens_q + b)
    first_k = tl.load(optional.cu_seqlens_k + b)
    rows = tl.load(optional.cu_seqlens_q + b + 1) - first_q
    columns = tl.load(optional.cu_seqlens_k + b + 1) - first_k
    L = tl.minimum(rows, optional.longest_q).to(tl.int32)
    S = tl.minimum(columns, optional.longest_k).to(tl.int32)
    return first_q, first_k, L, S, S - L
