"""Allocates the gradients of attention and launches the backward kernels of each family."""

import math
from typing import NamedTuple

import torch
from fusedseq.kernels import launch
from fusedseq.kernels.attention import launch_cache, packed, row
from fusedseq.kernels.attention.call import heads_last, row_alignment, strides, strides_of
from fusedseq.kernels.attention.plan import PROGRAMS, cdiv
from fusedseq.kernels.attention.tiled_backward import tiled_delta
from fusedseq.kernels.attention.tiled_backward_keys import tiled_backward_keys
from fusedseq.kernels.attention.tiled_backward_queries import tiled_backward_queries
from fusedseq.kernels.attention.tiled_bias import tiled_backward_bias

# The bits of `needs`. QKV and KV: dq, dk and dv, or dk and dv, may be stored as the gradient of one
# projection.
DQ, DK, DV, DBIAS, DRELATIVE, DSINKS, QKV, KV = (1 << n for n in range(8))


class Gradients(NamedTuple):
    """New gradients of q, k and v, and the heads that are stored for a position of each."""

    q: torch.Tensor | None  # (B, N, L, D), stored as (B, L, q_heads, D); None: not needed
    k: torch.Tensor | None  # (B, N_kv, S, D), stored as (B, S, k_heads, D)
    v: torch.Tensor | None  # as k
    q_heads: int
    k_heads: int


def new_gradients(q, k, packed_kernel, needs):
    """Allocates the Gradients of q, k and v.

    They are stored as (B, L or S, heads, D), or, where `needs` says that q, k, v are parts of one
    projection, as parts of its gradient, (B, L, parts, heads, D), so that autograd need not copy
    them into it.

    packed_kernel: whether the packed kernel computes them, which writes dk and dv of each query
    head
    """
    (B, N, _, D), N_kv = q.shape, k.size(1)
    per_query_head = packed_kernel and N_kv < N  # dk and dv are summed over the group afterwards
    parts = 3 if needs & QKV else 2 if needs & KV else 0
    first, row_size = q if parts == 3 else k, parts * N_kv * D
    # These are the strides of parts of a projection (B, L, ...); one of (L, B, ...) has others.
    if (
        parts
        and not per_query_head
        and first.stride() == (first.size(2) * row_size, D, row_size, 1)
    ):
        whole = first.new_empty(B, first.size(2), parts, N_kv, D)
        *dq, dk, dv = whole.permute(2, 0, 3, 1, 4).unbind(0)
        if parts == 3:
            return Gradients(dq[0], dk, dv, 3 * N, 3 * N)
        return Gradients(heads_last(q, *q.shape) if needs & DQ else None, dk, dv, N, 2 * N_kv)
    dq = heads_last(q, *q.shape) if needs & DQ else None
    if per_query_head:
        return Gradients(dq, None, None, N, N)
    dk, dv = (heads_last(k, *k.shape) if needs & bit else None for bit in (DK, DV))
    return Gradients(dq, dk, dv, N, N_kv)


def results(q, needs, *grads):
    """Returns the gradients in the order of the bits of `needs`, empty tensors where not needed."""
    return tuple(g if needs & 1 << bit else q.new_empty(0) for bit, g in enumerate(grads))


def new_logit_gradients(call, needs):
    """Allocates the (B, N, L, S) gradient of the logits if a bias needs its gradient, else None."""
    if not needs & DBIAS:
        return None
    return call.q.new_empty(call.B, call.N, call.L, call.S, dtype=torch.float32)


def packed_backward(call, dout, out, lse, grads, drelative, bias, needs, key):
    """Launches the packed backward. Returns dk, dv, dbias, dsinks; dq and drelative are written
    in place, as by the next two.

    grads: Gradients    drelative: fp32 zeros or None    key: of the launch cache
    """
    tiles, heads = call.plan.backward, call.B * call.N
    dk, dv = grads.k, grads.v
    if call.group > 1:  # a program has a few query heads, not all of a group: dk and dv of each
        shape = call.B, call.N, call.S, call.D
        dk, dv = (
            heads_last(call.q, *shape, dtype=torch.float32) if needs & bit else None
            for bit in (DK, DV)
        )
        key = None
    dlogits = new_logit_gradients(call, needs)
    key = key if dlogits is None else None
    inputs = dout, call.q, call.k, call.v
    args = (
        *inputs,
        *(grads.q, dk, dv, dlogits, drelative),
        *map(strides, inputs),
        call.optional,
        *(heads, grads.q_heads, grads.k_heads),
        *call.sizes,
    )
    constants = call.constants(tiles, call.q, dout)
    launch_cache.run(key, packed.packed_backward, cdiv(heads, tiles["G"]), args, constants)
    return sum_of_group(call, dk), sum_of_group(call, dv), as_bias(dlogits, bias), None


def sum_of_group(call, grad):
    """Sums a gradient (B, N, S, D) of the query heads to (B, N_kv, S, D)."""
    if grad is None or call.group == 1:
        return grad
    B, N, S, D = grad.shape
    total = grad.transpose(1, 2).unflatten(2, (N // call.group, call.group)).sum(3)
    return total.to(call.q.dtype).transpose(1, 2)


def as_bias(dlogits, bias):
    """Sums the gradient of the logits to the shape of the bias."""
    return None if dlogits is None else dlogits.sum_to_size(bias.shape).to(bias.dtype)


def row_backward(call, dout, out, lse, grads, drelative, bias, needs, key):
    """Launches the row backward; arguments and results as of packed_backward."""
    dlogits = new_logit_gradients(call, needs)
    key = key if dlogits is None else None
    inputs = dout, call.q, call.k, call.v
    args = (
        *inputs,
        *(grads.q, grads.k, grads.v, dlogits, drelative),
        *map(strides, inputs),
        call.optional,
        *(grads.q_heads, grads.k_heads),
        *call.sizes,
    )
    constants = call.constants(call.plan.backward, call.q, dout)
    launch_cache.run(key, row.row_backward, call.B * call.N // call.group, args, constants)
    return grads.k, grads.v, as_bias(dlogits, bias), None


class TiledBackward(NamedTuple):
    """The launches of the tiled backward kernels of a call that can be repeated."""

    delta: tuple  # compiled, blocks, and the arguments behind the tensors
    queries: launch_cache.CachedLaunch
    keys: launch_cache.CachedLaunch | None  # None where not needed, as the next
    bias: launch_cache.CachedLaunch | None
    bias_parts: int

    def run(self, dout, out, lse, q, k, v, grads, options):
        """Launches the kernels for other tensors. Returns dbias or None; the others are written in
        place."""
        delta, inverse = torch.empty_like(lse), torch.empty_like(lse)
        compiled, blocks, others = self.delta
        launch.relaunch(compiled, blocks, dout, out, delta, *others)
        inputs = dout, q, k, v, lse, delta, inverse
        self.queries.run((*inputs, grads.q, None), options)
        if self.keys is not None:
            self.keys.run((*inputs, grads.k, grads.v), options)
        if self.bias is None:
            return None
        dbias = new_bias_parts(q, options.bias, self.bias_parts)
        self.bias.run((*inputs, dbias), options)
        return dbias.sum(0).to(options.bias.dtype)


def tiled_backward_kernels(call, dout, out, lse, grads, drelative, bias, needs, key):
    """Launches the tiled backward kernels; arguments and results as of packed_backward."""
    heads, inputs = call.B * call.N, (dout, call.q, call.k, call.v)
    input_strides = strides_of(call, *inputs)
    dsinks = None
    # The padding of packed sequences in delta and inverse is not written.
    packed = call.optional.cu_seqlens_q is not None
    new = torch.zeros_like if packed else torch.empty_like
    delta, tiles = new(lse), call.plan.delta
    steps = cdiv(call.L, tiles["BM"])
    others = *strides_of(call, dout, out), steps, call.N, call.L, call.optional.cu_seqlens_q
    compiled = launch.run(
        tiled_delta,
        heads * steps,
        *(dout, out, delta, *others),
        D=call.D,
        BYTES=row_alignment(dout, out),
        **tiles,
    )
    of_delta = compiled, heads * steps, others
    # First, because it computes `inverse`, also where its gradients are not needed.
    inverse, tiles = new(lse), call.plan.queries
    steps, chunks = cdiv(call.L, tiles["BM"]), cdiv(call.D, tiles["BD"])
    operands = *inputs, lse, delta, inverse
    behind = *input_strides, call.optional
    of_queries = launch_cache.run(
        None,
        tiled_backward_queries,
        heads * steps * chunks,
        (*operands, grads.q, drelative, *behind, steps, grads.q_heads, *call.sizes),
        call.constants(tiles, call.q, dout),
    )
    if drelative is not None:
        drelative *= inverse.clamp(min=0).unsqueeze(-1)
    if needs & DSINKS and call.optional.sinks is not None:
        # A sink has a probability and no value. Where a query sees no key, lse is +inf.
        sink = torch.exp(call.optional.sinks.float()[:, None] - lse) * inverse.abs()
        dsinks = -(sink * delta).sum((0, 2)).to(call.q.dtype)
    of_keys = None
    if needs & (DK | DV):
        tiles = call.plan.backward
        steps, chunks = cdiv(call.S, tiles["BN"]), cdiv(call.D, tiles["BD"])
        of_keys = launch_cache.run(
            None,
            tiled_backward_keys,
            heads // call.group * steps * chunks,
            (*operands, grads.k, grads.v, *behind, steps, grads.k_heads, *call.sizes),
            call.constants(tiles, call.q, dout),
        )
    dbias, of_bias, parts = None, None, 0
    if needs & DBIAS:
        dbias, of_bias, parts = tiled_bias_gradient(call, operands, input_strides, bias)
    if key is not None and of_queries is not None:
        launch_cache.store(key, TiledBackward(of_delta, of_queries, of_keys, of_bias, parts))
    return grads.k, grads.v, dbias, dsinks


def new_bias_parts(q, bias, parts):
    """Allocates the parts whose sum is the gradient of a bias."""
    return q.new_empty(parts, *bias.shape, dtype=torch.float32)


def parts_of_bias(places, terms):
    """Returns in how many parts the tiles that are summed into a tile of a bias's gradient are
    computed.

    places: tiles of the gradient    terms: tiles that are summed into each; the kernel computes
    terms * parts in 32 bits
    """
    return max(1, min(PROGRAMS // max(places, 1), terms, (2**31 - 1) // max(terms, 1)))


def tiled_bias_gradient(call, operands, input_strides, bias):
    """Launches the kernel for the gradient of a bias, and sums its parts. Returns the gradient, the
    launch and the number of parts.

    operands: dout, q, k, v, lse, delta, inverse    input_strides: of the first four
    """
    tiles, full_shape = call.plan.bias, (call.B, call.N, call.L, call.S)
    summed = [size == 1 and full > 1 for size, full in zip(bias.shape, full_shape, strict=True)]
    counts = call.B, call.N, cdiv(call.L, tiles["BM"]), cdiv(call.S, tiles["BN"])
    places = math.prod(n for n, is_summed in zip(counts, summed, strict=True) if not is_summed)
    terms = math.prod(n for n, is_summed in zip(counts, summed, strict=True) if is_summed)
    parts = parts_of_bias(places, terms)
    dbias = new_bias_parts(call.q, bias, parts)
    constants = call.constants(tiles, call.q, operands[0])
    launched = launch_cache.run(
        None,
        tiled_backward_bias,
        places * parts,
        (*operands, dbias, *input_strides, call.optional, call.B, parts, *call.sizes),
        constants | dict(zip(("SUM_B", "SUM_N", "SUM_L", "SUM_S"), summed, strict=True)),
    )
    return dbias.sum(0).to(bias.dtype), launched, parts
