"""The launchers of attention; plan.py chooses the kernels.

fusedseq.reference.attention defines the operator and documents its arguments.
"""

import math

import torch
from fusedseq.kernels import launch, shapes
from fusedseq.kernels.attention import backward, launch_cache, packed, row, split, tiled
from fusedseq.kernels.attention.backward import DQ, DRELATIVE, new_gradients, results
from fusedseq.kernels.attention.call import (
    AT_END,
    all_none,
    extra_of,
    has_descriptors,
    heads_last,
    prepare,
    register_pressure,
    rotated,
    strides,
    strides_of,
    with_unit_stride,
)
from fusedseq.kernels.attention.checks import within_reach
from fusedseq.kernels.attention.plan import (
    POINTER_LOADS,
    SPECIALIZED_LOADS,
    cdiv,
    parts_of_keys,
    plan,
)
from triton.tools.tensor_descriptor import TensorDescriptor


def attention(
    q,  # (B, N, L, D)
    k,  # (B, N_kv, S, D)
    v,  # (B, N_kv, S, D)
    bias,  # (B or 1, N or 1, L or 1, S or 1) or None
    mask,  # bool, as bias
    key_lengths,  # (B,) int64 or None
    alibi,  # (N,) or None
    relative_keys,  # (2K + 1, D) or None
    rope,  # (P, R) or None
    rope_interleaved,
    key_rows,  # (B, S) int64 or None
    seed,  # (1,) int64, read if dropout > 0
    scale,
    causal,
    offset,  # position of query 0, or AT_END
    dropout,
    *extra,  # call.Extra
):
    """Returns out (B, N, L, D), stored as (B, L, N, D), and lse (B, N, L) fp32."""
    more, special = extra_of(extra)
    B, L, S = more.sizes(q, k, key_rows)
    offset = S - L if offset == AT_END else offset
    bias, mask = within_reach(bias), within_reach(mask)
    out, lse = heads_last(q, *q.shape), q.new_empty(B, q.size(1), L, dtype=torch.float32)
    if 0 in q.shape or S == 0 or B == 0:
        return out.zero_(), lse.fill_(math.inf)
    key = None
    if special:
        lse.fill_(math.inf)  # where packed sequences have padding
    elif all_none(relative_keys, key_rows):
        options = launch_cache.Options(
            bias, mask, key_lengths, alibi, rope, seed if dropout else None
        )
        key = launch_cache.cache_key(
            (q, k, v), options, rope_interleaved, dropout, scale, causal, offset
        )
        if cached := launch_cache.find(key):
            cached.run((q, k, v, out, lse), options)
            return out, lse
    tensors = q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope
    settings = key_rows, seed, scale, causal, offset, dropout, more
    call = prepare(*tensors, rope_interleaved, *settings)
    if not special and (parts := parts_of_keys(call.plan, call.B * call.N, call.L, call.S, call.D)):
        split_forward(call, parts, out, lse)
    else:
        forward(call, out, lse, key)
    return out, lse


def forward(call, out, lse, key):
    """Launches the forward kernel of the plan's family.    key: of the launch cache"""
    tiles, heads = call.plan.forward, call.B * call.N
    inputs = call.q, call.k, call.v
    operands = *inputs, out, lse, *strides_of(call, *inputs), call.optional
    constants = call.constants(tiles, call.q)
    if call.plan.family == "packed":
        args = *operands, heads, *call.sizes
        launch_cache.run(key, packed.packed_forward, cdiv(heads, tiles["G"]), args, constants)
        return
    steps = cdiv(call.L, tiles["BM"])
    args = *operands, steps, *call.sizes
    if call.plan.family == "row":
        launch_cache.run(key, row.row_forward, heads * steps, args, constants)
    else:
        tiled_forward(call, heads * steps * cdiv(call.D, tiles["BD"]), args, constants, key)


def tiled_forward(call, blocks, args, constants, key):
    """Launches the tiled kernel, whose tiles say how it loads keys and values."""
    loads = constants.pop("loads", POINTER_LOADS)
    capability = launch.capability(tiled.tiled_forward, call.k) if loads else 0
    if capability < 90 or not has_descriptors(call):
        constants["SPECIALIZED"] = False
        launch_cache.run(key, tiled.tiled_forward, blocks, args, constants)
        return
    block = [1, 1, constants["BN"], constants["BD"]]
    k, v = (TensorDescriptor(x, [*x.shape], [*x.stride()], block) for x in (call.k, call.v))
    q, _, _, out, lse, q_strides, _, _, *others = args
    operands = q, k, v, out, lse, q_strides, None, None
    # What Triton 3.7 compiles; with other tiles it loads in all warps, or fails.
    compiles = 100 <= capability < 120 and constants["warps"] == 8 and constants["stages"] > 1
    specialized = loads == SPECIALIZED_LOADS and compiles
    launch.run_uncached(
        tiled.tiled_forward, blocks, *operands, *others, **constants, SPECIALIZED=specialized
    )


def split_forward(call, parts, out, lse):
    """Launches the kernels that process the keys of each head in parts and combine these."""
    partial = call.q.new_empty(parts, call.B, call.L, call.N, call.D, dtype=torch.float32)
    statistics, tiles = lse.new_empty(2, parts, *lse.shape), call.plan.forward
    inputs = call.q, call.k, call.v
    launch.run(
        split.split_forward,
        call.B * call.N * parts * cdiv(call.D, tiles["BD"]),
        *(*inputs, partial, statistics),
        *(*map(strides, inputs), call.optional),
        *(parts, *call.sizes),
        **call.constants(tiles, call.q),
    )
    BD = call.plan.delta["BD"]
    launch.run(
        split.split_combine,
        lse.numel() * cdiv(call.D, BD),
        *(partial, statistics, out, lse, parts, call.N, call.L),
        D=call.D,
        BD=BD,
        PARTS=1 << (parts - 1).bit_length(),
        warps=4,
    )


BACKWARD = {
    "packed": backward.packed_backward,
    "row": backward.row_backward,
    "tiled": backward.tiled_backward_kernels,
}


def attention_backward(
    dout,  # (B, N, L, D)
    out,  # (B, N, L, D), saved by forward
    lse,  # (B, N, L) fp32, saved by forward
    q,  # from here to dropout as in forward
    k,
    v,
    bias,
    mask,
    key_lengths,
    alibi,
    relative_keys,
    rope,
    rope_interleaved,
    seed,
    scale,
    causal,
    offset,
    dropout,
    *extra,  # call.Extra, and last `needs`: bits, see backward.py
):
    """Returns dq, dk, dv, dbias, drelative_keys, dsinks; empty tensors for those that are not
    needed."""
    more, special = extra_of(extra[:-1])
    needs = extra[-1]
    B, L, S = more.sizes(q, k, None)
    offset = S - L if offset == AT_END else offset
    bias, mask = within_reach(bias), within_reach(mask)
    if 0 in q.shape or S == 0 or B == 0:
        heads = (heads_last(x, *x.shape).zero_() for x in (q, k, v))
        terms = (
            None if x is None else torch.zeros_like(x) for x in (bias, relative_keys, more.sinks)
        )
        return results(q, needs, *heads, *terms)
    key = None
    if not special and relative_keys is None:
        options = launch_cache.Options(
            bias, mask, key_lengths, alibi, rope, seed if dropout else None
        )
        key = launch_cache.cache_key(
            *((q, k, v, dout, out), options, rope_interleaved),
            *(dropout, scale, causal, offset, needs, lse.shape, lse.data_ptr() & 15),
        )
        if cached := launch_cache.find(key):
            grads, dbias = new_gradients(q, k, False, needs), None
            if isinstance(cached, backward.TiledBackward):
                dbias = cached.run(dout, out, lse, q, k, v, grads, options)
            else:
                cached.run((dout, q, k, v, *grads[:3], None, None), options)
            return results(q, needs, *grads[:3], dbias, None, None)
    tensors = q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope
    settings = None, seed, scale, causal, offset, dropout, more
    call = prepare(*tensors, rope_interleaved, *settings)
    rows = {"lse": (lse, (call.B, call.N, call.L))}
    shapes.require("attention_backward", dout=(dout, q.shape), out=(out, q.shape), **rows)
    dout = with_unit_stride(dout)
    grads = new_gradients(call.q, call.k, call.plan.family == "packed", needs)

    # The gradient of the products of q and relative_keys, which torch computed before the kernel.
    has_relative = relative_keys is not None and needs & (DQ | DRELATIVE)
    drelative = None
    if has_relative:
        drelative = torch.zeros_like(call.optional.relative, dtype=torch.float32)
    launch_kernels = BACKWARD[call.plan.family]
    dk, dv, dbias, dsinks = launch_kernels(call, dout, out, lse, grads, drelative, bias, needs, key)
    dq = grads.q
    if has_relative:
        drelative = drelative.to(q.dtype)  # (B, N, L, 2K + 1)
        if more.cu_seqlens_q is not None:
            b, i = more.places(q.size(2))
            drelative = drelative[b, :, i].transpose(0, 1)[None]
        if needs & DQ:
            dq += drelative @ relative_keys
        drelative = drelative.flatten(0, 2).T @ call.q.flatten(0, 2) if needs & DRELATIVE else None
    if call.applied_rope is not None:
        dq, dk = (
            rotated_back(dq, call.applied_rope, offset),
            rotated_back(dk, call.applied_rope, 0),
        )
    return results(q, needs, dq, dk, dv, dbias, drelative, dsinks)


def rotated_back(grad, rope, first):
    """Returns the gradient of a rotation's input, stored as (B, L, N, D), or None."""
    if grad is None:
        return None
    return heads_last(grad, *grad.shape).copy_(rotated(grad, rope, first, -1))


def explain(
    q,
    k,
    v,
    *cu_seqlens,  # of attention_varlen, and the longest sequences
    key_rows=None,
    bias=None,
    mask=None,
    rope=None,
    relative_keys=None,
    dropout=0.0,
    window=None,
    softcap=0.0,
    sinks=None,
    **options,
):
    """Returns which kernel a call of fused.attention or fused.attention_varlen runs, and why."""
    if cu_seqlens or "cu_seqlens_q" in options:
        return "kernels/attention/tiled.py; sequences of different lengths"
    if window is not None or softcap or sinks is not None:
        return "kernels/attention/tiled.py; a window, softcap or sinks"
    S = k.size(2) if key_rows is None else key_rows.size(1)
    pressure = register_pressure(dropout, bias, mask, rope, relative_keys)
    chosen = plan(q.size(2), S, q.size(3), q.element_size(), pressure)
    if parts := parts_of_keys(chosen, q.size(0) * q.size(1), q.size(2), S, q.size(3)):
        return f"kernels/attention/split.py; few queries, their keys in {parts} parts"
    return f"kernels/attention/{chosen.family}.py; {chosen.why}"
