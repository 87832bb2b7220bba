"""The launchers of attention. kernels/attention_plan.py says which kernels run."""

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from fusedseq.kernels import (
    attention_kept,
    attention_packed,
    attention_row,
    attention_split,
    attention_tiled,
    launch,
    philox,
)
from fusedseq.kernels.attention_plan import DROPOUT, PLAIN, PROGRAMS, RICH, Plan, cdiv, parts_of_keys, plan
from fusedseq.kernels.attention_tile import Terms

# The bits of `needs`; the last two: dq, dk and dv, or dk and dv, may be laid out as the gradient of one projection
DQ, DK, DV, DBIAS, DRELATIVE, QKV, KV = (1 << n for n in range(7))


class Call(NamedTuple):
    """The arguments of the kernels, from those of the operator."""

    B: int
    L: int
    S: int
    D: int
    q: torch.Tensor  # these three with a last stride of 1
    k: torch.Tensor
    v: torch.Tensor
    terms: Terms
    sizes: tuple[Any, ...]  # N, L, S, offset, threshold, scale, keep_scale, group
    plan: Plan
    causal: bool
    turned: torch.Tensor | None  # the rope, if q and k have been rotated before the kernel

    @property
    def N(self):
        return self.sizes[0]

    @property
    def group(self):
        return self.sizes[-1]

    def constants(self, tiles, *tensors):
        """The compile-time arguments of a kernel that reads `tensors` beside k and v."""
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32" and self.q.dtype == torch.float32
        return {
            **tiles, "D": self.D, "CAUSAL": self.causal, "PRECISION": "tf32" if tf32 else "ieee",
            "BYTES": common_alignment(self.k, self.v, *tensors),
        }  # fmt: skip


def prepare(
    q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, key_rows, seed, scale, causal, offset, dropout
):
    (B, N, L, D), S = q.shape, k.size(2) if key_rows is None else key_rows.size(1)
    turned = None
    if relative_keys is not None and rope is not None:  # their product is with the rotated queries
        q, k, turned, rope = rotated(q, rope, offset), rotated(k[:, :, :S], rope, 0), rope, None
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    terms = Terms(
        bias=bias,
        bias_at=broadcast_strides(bias),
        mask=mask,
        mask_at=broadcast_strides(mask),
        step=common_step(S, bias, mask),
        key_lengths=dense(key_lengths),
        alibi=dense(alibi),
        relative=None if relative_keys is None else (q @ relative_keys.T).contiguous(),
        clip=None if relative_keys is None else len(relative_keys) // 2,
        rope=dense(rope),
        key_rows=dense(key_rows),
        seed=seed if dropout else None,
    )
    sizes = (N, L, S, offset, philox.threshold(dropout), scale, philox.scale(dropout), N // k.size(1))
    chosen = plan(L, S, D, q.element_size(), options_of(dropout, bias, mask, rope, relative_keys))
    return Call(B, L, S, D, q, k, v, terms, sizes, chosen, causal, turned)


def options_of(dropout, *rich):
    return RICH if any(option is not None for option in rich) else DROPOUT if dropout else PLAIN


def attention(
    q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, key_rows, seed, scale, causal, offset, dropout
):  # fmt: skip
    out, lse = heads_last(q, *q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    key = None
    if none_of(bias, mask, relative_keys, key_rows):
        key = attention_kept.key_of((q, k, v), key_lengths, alibi, rope, seed, dropout, scale, causal, offset)
        if kept := attention_kept.find(key):
            kept.run((q, k, v, out, lse), key_lengths, alibi, rope, seed if dropout else None)
            return out, lse
    call = prepare(
        q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, key_rows, seed, scale, causal, offset, dropout
    )
    tiles, heads = call.plan.forward, call.B * call.N
    operands = call.q, call.k, call.v, out, lse, *map(strides, (call.q, call.k, call.v)), call.terms
    constants = call.constants(tiles, call.q)
    if call.plan.family == "packed":
        args = *operands, heads, *call.sizes
        attention_kept.run(key, attention_packed.packed_forward, cdiv(heads, tiles["G"]), args, constants)
        return out, lse
    steps = cdiv(call.L, tiles["BM"])
    if call.plan.family == "row":
        attention_kept.run(key, attention_row.row_forward, heads * steps, (*operands, steps, *call.sizes), constants)
        return out, lse
    if parts := parts_of_keys(call.plan, heads, call.L, call.S, call.D):
        split_forward(call, parts, out, lse)
        return out, lse
    blocks = heads * steps * cdiv(call.D, tiles["BD"])
    launch.run(attention_tiled.tiled_forward, blocks, *operands, steps, *call.sizes, **constants)
    return out, lse


def split_forward(call, parts, out, lse):
    """The keys in parts, and what comes of them."""
    partial = call.q.new_empty(parts, call.B, call.L, call.N, call.D, dtype=torch.float32)
    partial_lse, tiles = lse.new_empty(parts, *lse.shape), call.plan.forward
    launch.run(
        attention_split.split_forward, call.B * call.N * parts * cdiv(call.D, tiles["BD"]), call.q, call.k, call.v, partial,
        partial_lse, *map(strides, (call.q, call.k, call.v)), call.terms, parts, *call.sizes,
        **call.constants(tiles, call.q),
    )  # fmt: skip
    BD = call.plan.delta["BD"]
    launch.run(
        attention_split.split_combine, lse.numel() * cdiv(call.D, BD), partial, partial_lse, out, lse, parts, call.N, call.L,
        D=call.D, BD=BD, PARTS=1 << (parts - 1).bit_length(), warps=4,
    )  # fmt: skip


def attention_backward(
    dout, out, lse, q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, seed, scale, causal, offset, dropout, needs
):  # fmt: skip
    key = None
    if none_of(bias, mask, relative_keys):
        key = attention_kept.key_of(
            (q, k, v, dout), key_lengths, alibi, rope, seed, dropout, scale, causal, offset, needs
        )
        if kept := attention_kept.find(key):
            grads = new_gradients(q, k, False, needs)
            kept.run((dout, q, k, v, *grads[:3], None, None), key_lengths, alibi, rope, seed if dropout else None)
            return results(q, needs, *grads[:3], None, None)
    call = prepare(
        q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, None, seed, scale, causal, offset, dropout
    )
    dout, relative = with_unit_stride(dout), relative_keys is not None and needs & (DQ | DRELATIVE)
    grads = new_gradients(call.q, call.k, call.plan.family == "packed", needs)
    dq = grads.q
    drelative = torch.zeros_like(call.terms.relative, dtype=torch.float32) if relative else None
    backward = {"packed": packed_backward, "row": row_backward, "tiled": tiled_backward}[call.plan.family]
    dk, dv, dbias = backward(call, dout, out, lse, grads, drelative, bias, needs, key)
    if relative:
        drelative = drelative.to(q.dtype)  # (B, N, L, 2K + 1)
        if needs & DQ:
            dq += drelative @ relative_keys
        drelative = drelative.flatten(0, 2).T @ call.q.flatten(0, 2) if needs & DRELATIVE else None
    if call.turned is not None:
        dq = dq if dq is None else heads_last(dq, *dq.shape).copy_(rotated(dq, call.turned, offset, -1))
        dk = dk if dk is None else heads_last(dk, *dk.shape).copy_(rotated(dk, call.turned, 0, -1))
    return results(q, needs, dq, dk, dv, dbias, drelative)


def none_of(*options):
    return all(option is None for option in options)


def results(q, needs, *grads):
    """Something in place of those that are not needed."""
    return tuple(g if needs & 1 << bit else q.new_empty(0) for bit, g in enumerate(grads))


class Gradients(NamedTuple):
    """New ones of q, k and v, None where not needed; and how many heads of D there are in a row of q's, and of the others'."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    q_heads: int
    k_heads: int


def new_gradients(q, k, packed, needs):
    """They lie as (B, L or S, N, D), or, where `needs` says that the arguments are parts of one projection, as its gradient."""
    (B, N, _, D), N_kv = q.shape, k.size(1)
    of_query_heads = packed and N_kv < N  # dk and dv, which are summed afterwards
    parts = 3 if needs & QKV else 2 if needs & KV else 0
    first, row = q if parts == 3 else k, parts * N_kv * D
    if parts and not of_query_heads and first.stride() == (first.size(2) * row, D, row, 1):  # else (L, B, ...)
        *dq, dk, dv = first.new_empty(B, first.size(2), parts, N_kv, D).permute(2, 0, 3, 1, 4).unbind(0)
        if parts == 3:
            return Gradients(dq[0], dk, dv, 3 * N, 3 * N)
        return Gradients(heads_last(q, *q.shape) if needs & DQ else None, dk, dv, N, 2 * N_kv)
    dq, dk, dv = (heads_last(t, *t.shape) if needs & bit else None for t, bit in ((q, DQ), (k, DK), (k, DV)))
    return Gradients(dq, None, None, N, N) if of_query_heads else Gradients(dq, dk, dv, N, N_kv)


def packed_backward(call, dout, out, lse, grads, drelative, bias, needs, key):
    tiles, heads = call.plan.backward, call.B * call.N
    dk, dv = grads.k, grads.v
    if call.group > 1:  # of each query head: a program has a few of them, not all of a group
        shape = call.B, call.N, call.S, call.D
        dk, dv = (heads_last(call.q, *shape, dtype=torch.float32) if needs & bit else None for bit in (DK, DV))
    dlogits = call.q.new_empty(call.B, call.N, call.L, call.S, dtype=torch.float32) if needs & DBIAS else None
    args = (
        dout, call.q, call.k, call.v, grads.q, dk, dv, dlogits, drelative, *map(strides, (dout, call.q, call.k, call.v)),
        call.terms, heads, grads.q_heads, grads.k_heads, *call.sizes,
    )  # fmt: skip
    key = None if call.group > 1 else key
    attention_kept.run(
        key, attention_packed.packed_backward, cdiv(heads, tiles["G"]), args, call.constants(tiles, call.q, dout)
    )
    return of_the_group(call, dk), of_the_group(call, dv), as_bias(dlogits, bias)


def of_the_group(call, grad):
    """(B, N, S, D) of the query heads, summed to (B, N_kv, S, D)."""
    if grad is None or call.group == 1:
        return grad
    B, N, S, D = grad.shape
    total = grad.transpose(1, 2).unflatten(2, (N // call.group, call.group)).sum(3)
    return total.to(call.q.dtype).transpose(1, 2)


def as_bias(dlogits, bias):
    return None if dlogits is None else dlogits.sum_to_size(bias.shape).to(bias.dtype)


def row_backward(call, dout, out, lse, grads, drelative, bias, needs, key):
    dlogits = call.q.new_empty(call.B, call.N, call.L, call.S, dtype=torch.float32) if needs & DBIAS else None
    args = (
        dout, call.q, call.k, call.v, *grads[:3], dlogits, drelative, *map(strides, (dout, call.q, call.k, call.v)),
        call.terms, *grads[3:], *call.sizes,
    )  # fmt: skip
    constants = call.constants(call.plan.backward, call.q, dout)
    attention_kept.run(key, attention_row.row_backward, call.B * call.N // call.group, args, constants)
    return grads.k, grads.v, as_bias(dlogits, bias)


def tiled_backward(call, dout, out, lse, grads, drelative, bias, needs, _):
    heads, kernel_strides = call.B * call.N, tuple(map(strides, (dout, call.q, call.k, call.v)))
    operands, constants = (dout, call.q, call.k, call.v, lse), lambda tiles: call.constants(tiles, call.q, dout)
    delta, tiles = torch.empty_like(lse), call.plan.delta
    steps = cdiv(call.L, tiles["BM"])
    launch.run(
        attention_tiled.tiled_delta, heads * steps, dout, out, delta, strides(dout), strides(out), steps, *call.sizes[:2],
        D=call.D, BYTES=common_alignment(dout, out), **tiles,
    )  # fmt: skip
    if needs & (DK | DV):
        tiles = call.plan.backward
        steps, chunks = cdiv(call.S, tiles["BN"]), cdiv(call.D, tiles["BD"])
        launch.run(
            attention_tiled.tiled_backward_keys, heads // call.group * steps * chunks, *operands, delta, grads.k,
            grads.v, *kernel_strides, call.terms, steps, grads.k_heads, *call.sizes, **constants(tiles),
        )  # fmt: skip
    if grads.q is not None or drelative is not None:
        tiles = call.plan.queries
        steps, chunks = cdiv(call.L, tiles["BM"]), cdiv(call.D, tiles["BD"])
        launch.run(
            attention_tiled.tiled_backward_queries, heads * steps * chunks, *operands, delta, grads.q,
            drelative, *kernel_strides, call.terms, steps, grads.q_heads, *call.sizes, **constants(tiles),
        )  # fmt: skip
    if not needs & DBIAS:
        return grads.k, grads.v, None
    tiles, whole = call.plan.bias, (call.B, call.N, call.L, call.S)
    summed = [size == 1 and full > 1 for size, full in zip(bias.shape, whole, strict=True)]
    counts = call.B, call.N, cdiv(call.L, tiles["BM"]), cdiv(call.S, tiles["BN"])
    places = math.prod(n for n, s in zip(counts, summed, strict=True) if not s)
    parts = max(1, min(PROGRAMS // max(places, 1), math.prod(n for n, s in zip(counts, summed, strict=True) if s)))
    dbias = call.q.new_empty(parts, *bias.shape, dtype=torch.float32)
    launch.run(
        attention_tiled.tiled_backward_bias, places * parts, *operands, delta, dbias, *kernel_strides, call.terms, call.B,
        parts, *call.sizes, **constants(tiles), **dict(zip(("SUM_B", "SUM_N", "SUM_L", "SUM_S"), summed, strict=True)),
    )  # fmt: skip
    return grads.k, grads.v, dbias.sum(0).to(bias.dtype)


def heads_last(like, B, N, L, D, dtype=None):
    """A new (B, N, L, D) that lies in memory as (B, L, N, D)."""
    return like.new_empty(B, L, N, D, dtype=dtype).transpose(1, 2)


def with_unit_stride(x):
    return x if x.stride(-1) == 1 or x.size(-1) == 1 else x.contiguous()


def strides(x):
    return x.stride()[:3]


def dense(option):
    return None if option is None else option.contiguous()


def broadcast_strides(option):
    """0 for a dimension that is broadcast."""
    if option is None:
        return None
    return tuple(0 if size == 1 else stride for size, stride in zip(option.shape, option.stride(), strict=True))


def common_alignment(*tensors):
    """The largest power of two, at most 16, of which the address of every row of these is a multiple."""
    bits = 16
    for x in tensors:
        bits |= x.data_ptr()
        for stride in x.stride()[:3]:
            bits |= stride * x.element_size()
    return bits & -bits


def common_step(S, *options):
    """The largest power of two, at most 16, of which S and the start of every row of these is a multiple; None without any.

    1 where a column is not next to the other: then it tells the compiler nothing wrong.
    """
    options = [x for x in options if x is not None]
    bits = 16 | S
    for x in options:
        *rows, column = broadcast_strides(x)
        bits |= 1 if column > 1 else x.data_ptr() // x.element_size()
        for stride in rows:
            bits |= stride
    return tl.constexpr(bits & -bits) if options else None


def rotated(x, table, first, sign=1):
    """The pairs of x (B, N, L, D) turned by the angles of its positions, from `first` on."""
    rows = table[first : first + x.size(2)].float().unflatten(-1, (-1, 2))
    (cos, sin), (a, b) = rows.unbind(-1), x.float().unflatten(-1, (-1, 2)).unbind(-1)
    sin = sin * sign
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def explain(q, k, v, *, key_rows=None, bias=None, mask=None, rope=None, relative_keys=None, dropout=0.0, **options):
    S = k.size(2) if key_rows is None else key_rows.size(1)
    taking = options_of(dropout, bias, mask, rope, relative_keys)
    chosen = plan(q.size(2), S, q.size(3), q.element_size(), taking)
    if parts := parts_of_keys(chosen, q.size(0) * q.size(1), q.size(2), S, q.size(3)):
        return f"kernels/attention_split.py; few queries, their keys in {parts} parts"
    return f"kernels/attention_{chosen.family}.py; {chosen.why}"
