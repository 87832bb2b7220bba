import torch

from fusedseq import reference
from fusedseq.fused import autograd, check

DTYPES = {**check.TRITON, "cpu": (*check.DTYPES["cpu"], torch.float16)}
MAX_HEAD_DIM = 2048


def attention(
    q, k, v, *, scale=None, causal=False, key_lengths=None, mask=None, bias=None, alibi=None, relative_keys=None,
    rope=None, offset=None, key_rows=None, dropout=0.0, seed=0,
):  # fmt: skip
    """As `fusedseq.reference.attention`, forward and backward without the (B, N, L, S) tensors in memory: of the
    probabilities only their log-sum-exp is kept. Any strides are taken as they are if the last is 1, so q, k and v may be
    views of one projection; the result lies in memory as (B, L, N, D), ready to be flattened for the next projection.

    What stands in k and v behind key_lengths is never looked at: it may be uninitialised memory. Other keys that are masked,
    by causality too, must be finite: their probability is 0, and 0 * inf or NaN is NaN. (The oracle needs it of all.)

    Under autocast q, k, v, bias and relative_keys are cast to its dtype; alibi and rope may be fp32 beside any dtype. All is
    accumulated in fp32 (fp64 for fp64), in an order that depends on the shapes and the number of threads alone.
    Errors: ValueError or TypeError naming the argument, for shapes, devices, D above 2048, dtypes other than fp32, bf16,
    fp16 and, on a CPU, fp64; for key_lengths outside [0, S], an odd D or too short a table with rope, key_rows outside of
    k; RuntimeError for gradients with key_rows, which is for inference.
    """
    op = "attention"
    plain = key_lengths is mask is bias is alibi is relative_keys is rope is offset is key_rows is None
    plain = plain and causal is False and dropout == 0 and type(seed) is int and (scale is None or type(scale) is float)
    if plain and not autograd.is_transformed():
        found = (
            autograd.recorder.self_attention(q, k, v, scale) if autograd.recorder else self_attention(q, k, v, scale)
        )
        if found is not NotImplemented:
            return found
    check.tensor(op, "q", q)
    q, k, v, bias, relative_keys = autograd.autocast(q.device.type, q, k, v, bias, relative_keys)
    check.like(op, q, "q", ("bias", "relative_keys"), dtypes=DTYPES, k=k, v=v, bias=bias, relative_keys=relative_keys)
    S = check_shapes(op, q, k, v, key_rows)
    if key_rows is not None:
        check_key_rows(op, key_rows, q, k, S)
        check_no_gradients(op, q, k, v, bias, relative_keys)
    B, N, L, D = q.shape
    offset = S - L if offset is None else offset
    check_kind(op, "offset", offset, "a whole number", int, torch.SymInt)
    check.probability(op, "dropout", dropout)
    mask = check_mask(op, mask, q, S)
    bias = check_broadcast(op, "bias", bias, q, S)
    if key_lengths is not None:
        check_beside(op, "key_lengths", key_lengths, q)
        check.whole_numbers(op, "key_lengths", key_lengths, 0, S, f"[0, S] = [0, {S}]")
        check.shape(op, "key_lengths", key_lengths, "(B,)", (B,))
    alibi = check_constant(op, "alibi", alibi, q)
    if alibi is not None:
        check.shape(op, "alibi", alibi, "(N,)", (N,))
    if relative_keys is not None:
        check.dimensions(op, "relative_keys", relative_keys, "(2K + 1, D)")
        if relative_keys.size(1) != D or relative_keys.size(0) % 2 == 0:
            raise ValueError(f"{op}: relative_keys must be (2K + 1, D) with D = {D} and an odd number of rows, got "
                             f"{tuple(relative_keys.shape)}")  # fmt: skip
    rope = check_rope(op, rope, q, S, offset)
    seed = check.seed(op, seed, q.device)
    seed = seed if dropout else None
    scale = D**-0.5 if scale is None else scale
    check_kind(op, "scale", scale, "a number", int, float, torch.SymInt, torch.SymFloat)
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal must be True or False, got {causal!r}")
    return autograd.call(
        "attention",
        q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, key_rows, seed, float(scale), causal, offset,
        float(dropout),
    )[0]  # fmt: skip


def self_attention(q, k, v, scale):
    """The short way of small calls, of which the checks are a fifth of the time, as in csrc/_autograd.cpp; NotImplemented
    unless they are tensors in which none of the checks finds a fault."""
    if not is_self_attention(q, k, v):
        return NotImplemented
    scale = q.size(3) ** -0.5 if scale is None else scale
    return autograd.call("attention", q, k, v, *[None] * (TENSORS - 3), scale, False, 0, 0.0)[0]


def is_self_attention(q, k, v):
    if not type(q) is type(k) is type(v) is torch.Tensor:
        return False
    shape, device, dtype = q.shape, q.device, q.dtype
    if not (shape == k.shape == v.shape and dtype is k.dtype is v.dtype and device == k.device == v.device):
        return False
    if len(shape) != 4 or 0 in shape[1:] or shape[3] > MAX_HEAD_DIM or torch.is_autocast_enabled(device.type):
        return False
    return dtype in DTYPES.get(device.type, ())


def check_shapes(op, q, k, v, key_rows):
    """The number of keys."""
    for name, t, symbols in (("q", q, "(B, N, L, D)"), ("k", k, "(B, N_kv, S, D)")):
        check.dimensions(op, name, t, symbols)
    (B, N, L, D), (_, N_kv, S, _) = q.shape, k.shape
    if N == 0 or L == 0 or not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(
            f"{op}: q must be (B, N, L, D) with N and L at least 1 and D in [1, {MAX_HEAD_DIM}], got {tuple(q.shape)}"
        )
    if k.size(3) != D or S == 0 or N_kv == 0 or N % N_kv:
        raise ValueError(f"{op}: k must be (B, N_kv, S, D) with D = {D}, S at least 1 and an N_kv that divides N = {N}, got "
                         f"{tuple(k.shape)}")  # fmt: skip
    check.shape(op, "v", v, "(B, N_kv, S, D)", k.shape)
    if key_rows is not None:
        check_beside(op, "key_rows", key_rows, q)
        check.dimensions(op, "key_rows", key_rows, "(B, S)")
        return key_rows.size(1)
    check.shape(op, "k", k, "(B, N_kv, S, D)", (B, N_kv, S, D))
    return S


def check_key_rows(op, key_rows, q, k, S):
    rows, _, most, _ = k.shape
    if key_rows.size(0) != q.size(0) or not 1 <= S <= most:
        raise ValueError(
            f"{op}: key_rows must be (B, S) with B = {q.size(0)} and S in [1, {most}], got {tuple(key_rows.shape)}"
        )
    check.whole_numbers(op, "key_rows", key_rows, 0, rows - 1, f"[0, {rows}), the rows of k")


def check_no_gradients(op, *tensors):
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(f"{op}: key_rows is for inference and must come without gradients, got q, k, v, bias or "
                           "relative_keys that requires one")  # fmt: skip


def check_kind(op, name, value, wanted, *types):
    if isinstance(value, bool) or not isinstance(value, types):
        raise TypeError(f"{op}: {name} must be {wanted}, got {type(value).__name__}")


def check_beside(op, name, value, q):
    check.tensor(op, name, value)
    if value.device != q.device:
        raise ValueError(f"{op}: {name} must be on the device of q, {q.device}, got {value.device}")


def check_broadcast(op, name, value, q, S):
    """With four dimensions, each 1 or whole."""
    if value is None:
        return None
    B, N, L, _ = q.shape
    sizes = (1,) * (4 - value.dim()) + tuple(value.shape)
    if len(sizes) != 4 or any(n not in (1, whole) for n, whole in zip(sizes, (B, N, L, S), strict=True)):
        raise ValueError(
            f"{op}: {name} must be broadcastable to (B, N, L, S) = {(B, N, L, S)}, got {tuple(value.shape)}"
        )
    return value.reshape(sizes)


def check_mask(op, mask, q, S):
    if mask is None:
        return None
    check_beside(op, "mask", mask, q)
    if mask.dtype != torch.bool:
        raise TypeError(f"{op}: mask must be bool, True where a key is seen, got {mask.dtype}; a float mask is a bias")
    return check_broadcast(op, "mask", mask, q, S)


def check_constant(op, name, value, q):
    if value is None:
        return None
    check_beside(op, name, value, q)
    if value.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"{op}: {name} must be float32 or of the dtype of q, {q.dtype}, got {value.dtype}")
    return value.detach()


def check_rope(op, rope, q, S, offset):
    rope = check_constant(op, "rope", rope, q)
    if rope is None:
        return None
    L, D = q.shape[2:]
    check.dimensions(op, "rope", rope, "(P, D)")
    least = max(S, L + offset)
    if D % 2 or rope.size(1) != D or rope.size(0) < least or offset < 0:
        raise ValueError(f"{op}: rope must be (P, D) with an even D = {D} and P at least {least}, the positions there are, "
                         f"and offset at least 0, got {tuple(rope.shape)} and offset {offset}")  # fmt: skip
    return rope


def heads_last(like, B, N, L, D):
    """A new (B, N, L, D) that lies in memory as (B, L, N, D)."""
    return like.new_empty(B, L, N, D).transpose(1, 2)


def fake(q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, key_rows, *settings):
    B, N, L, D = q.shape
    return heads_last(q, B, N, L, D), q.new_empty(B, N, L, dtype=computing(q))


def computing(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def fake_backward(dout, out, lse, q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, *rest):
    needs = rest[-1]
    (B, N, L, D), (_, N_kv, S, _) = q.shape, k.shape
    none = q.new_empty(0)
    return (
        heads_last(q, B, N, L, D) if needs & 1 else none,
        heads_last(q, B, N_kv, S, D) if needs & 2 else none.clone(),
        heads_last(q, B, N_kv, S, D) if needs & 4 else none.clone(),
        q.new_empty(bias.shape) if needs & 8 else none.clone(),
        q.new_empty(relative_keys.shape) if needs & 16 else none.clone(),
    )


TENSORS = 11  # the operator's tensor arguments


def setup(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.settings = inputs[TENSORS:]


def oracle(
    q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, key_rows, seed, scale, causal, offset, dropout
):
    return reference.attention(
        q, k, v, scale=scale, causal=causal, key_lengths=key_lengths, mask=mask, bias=bias, alibi=alibi,
        relative_keys=relative_keys, rope=rope, offset=offset, key_rows=key_rows, dropout=dropout, seed=seed,
    )  # fmt: skip


TOGETHER = {3: 32, 2: 64}  # the bits of `needs`, by the parts


def together(q, k, v, needs):
    """A bit of `needs` where q, k, v, or k and v, are parts (B, N, L, D) of one projection, the whole of which is made of
    them: their gradients may be laid out as its gradient then, so that nothing needs to be copied together."""
    if not (needs[1] and needs[2]) or not type(q) is type(k) is type(v) is torch.Tensor:
        return 0
    parts = (q, k, v) if needs[0] and q.shape == k.shape and adjacent(q, k) else (k, v)
    B, N, S, D = k.shape
    row = len(parts) * N * D
    whole = k.stride() in ((S * row, D, row, 1), (row, D, B * row, 1))
    return TOGETHER[len(parts)] if whole and adjacent(k, v) else 0


def adjacent(a, b):
    """Whether b's rows follow those of a in memory."""
    behind = a.size(1) * a.size(3) * a.element_size()
    return a.stride() == b.stride() and b.data_ptr() == a.data_ptr() + behind


def backward(ctx, dout, _):
    needs = ctx.needs_input_grad
    if dout is None:
        return (None,) * len(needs)
    *inputs, out, lse = ctx.saved_tensors
    if torch.is_grad_enabled():
        return tuple(autograd.through_oracle(oracle, [*inputs, *ctx.settings], needs, [dout]))
    q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, _, seed = inputs
    bits = needs[0] | needs[1] << 1 | needs[2] << 2 | needs[3] << 3 | needs[7] << 4 | together(q, k, v, needs)
    dq, dk, dv, dbias, drelative_keys = autograd.below(
        "attention_backward",
        dout, out, lse, q, k, v, bias, mask, key_lengths, alibi, relative_keys, rope, seed, *ctx.settings, bits,
    )  # fmt: skip
    return (
        dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None, dbias if needs[3] else None,
        None, None, None, drelative_keys if needs[7] else None, *[None] * (len(needs) - 8),
    )  # fmt: skip


autograd.register("attention", fake, backward, setup, fakes=[("attention_backward", fake_backward)])
