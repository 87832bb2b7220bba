import torch

from fusedseq import reference
from fusedseq.fused import autograd, check, lstm_cudnn

SAVED_AS_GIVEN = {"cuda"}  # devices whose kernels save activations in the tensors' dtype, and no low rank's factors
PAD = 16  # saved rows are whole vectors on every machine: csrc/cpu/kernels.h


def lstm(x, W_ih, W_hh, b, h0, c0, lengths=None, *, weight_drop=0.0, variational=False, training=True, seed=0):
    """As `fusedseq.reference.lstm`. The whole sequence is one call; the inputs' product is taken for all steps at once,
    weights are packed once, and each weight's gradient is one product after the loop. Where cuDNN has a persistent kernel
    for the call, in fp16, it is cuDNN's: `fused.explain` says so.

    Under autocast the operands are cast to its dtype; 16-bit inputs are accumulated and carried in fp32.
    Errors: ValueError or TypeError naming the argument, for shapes, devices, dtypes other than fp32, fp64, bf16 and on
    CUDA fp16, lengths outside [0, T], a weight_drop outside [0, 1].
    """
    op = "lstm"
    check_gates(op, x, W_ih, W_hh, b, h0, c0, lengths)
    check.probability(op, "weight_drop", weight_drop)
    p = weight_drop if training else 0.0
    seed = check.seed(op, seed, x.device) if p else None  # a seed's way to a GPU would be waited for
    tensors = autograd.autocast(x.device.type, x, W_ih, W_hh, b, h0, c0)
    if lstm_cudnn.takes(*tensors, lengths=lengths, weight_drop=p):
        y, h, c = lstm_cudnn.CudnnLstm.apply(reference.lstm, *tensors)
    else:
        y, h, c, _, _ = autograd.call(op, *tensors, lengths, seed, p, variational)
    return y, (h, c)


def check_gates(op, x, W_ih, W_hh, b, h0, c0, lengths):
    """What lstm and mogrifier_lstm have in common."""
    check.tensor(op, "x", x)
    x, W_ih, W_hh, b, h0, c0 = autograd.autocast(x.device.type, x, W_ih, W_hh, b, h0, c0)
    check.like(op, x, "x", ("b",), W_ih=W_ih, W_hh=W_hh, b=b, h0=h0, c0=c0)
    check.dimensions(op, "x", x, "(T, B, X)")
    check.dimensions(op, "h0", h0, "(B, H)")
    (T, B, X), H = x.shape, h0.size(1)
    if T == 0 or X == 0 or H == 0:
        raise ValueError(f"{op}: x must be (T, B, X) and h0 (B, H) with T, X and H at least 1, got {tuple(x.shape)} "
                         f"and {tuple(h0.shape)}")  # fmt: skip
    check.shape(op, "h0", h0, "(B, H)", (B, H))
    check.shape(op, "c0", c0, "(B, H)", (B, H))
    check.shape(op, "W_ih", W_ih, "(4H, X)", (4 * H, X))
    check.shape(op, "W_hh", W_hh, "(4H, H)", (4 * H, H))
    if b is not None:
        check.shape(op, "b", b, "(4H,)", (4 * H,))
    if lengths is not None:
        check.whole_numbers(op, "lengths", lengths, 0, T, f"[0, T] = [0, {T}]")
        check.shape(op, "lengths", lengths, "(B,)", (B,))
        if lengths.device != x.device:
            raise ValueError(f"{op}: lengths must be on the device of x, {x.device}, got {lengths.device}")


def pad(n):
    return (n + PAD - 1) // PAD * PAD


def saved_dtypes(x):
    """What the kernels save activations in, and what they compute, carry and save states in."""
    computing = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.dtype if x.device.type in SAVED_AS_GIVEN else computing, computing


def fake(x, W_ih, W_hh, b, h0, c0, *_):
    (T, B, _), H, (own, computing) = x.shape, h0.size(1), saved_dtypes(x)
    return (
        x.new_empty(T, B, H),
        h0.new_empty(B, H),
        c0.new_empty(B, H),
        x.new_empty(T, B, 4, pad(H), dtype=own),
        x.new_empty(T, B, pad(H), dtype=computing),
    )


def fake_gradients(like, tensors, needed):
    """Contiguous gradients, or empty tensors where there is none to give: see csrc/recurrence.h."""
    return tuple(
        like.new_empty(t.shape if t is not None and need else (0,)) for t, need in zip(tensors, needed, strict=True)
    )


def fake_backward(dy, dh, dc, x, W_ih, W_hh, b, h0, c0, *rest):
    needs = rest[-1]
    return fake_gradients(x, (x, W_ih, W_hh, b, h0, c0), [needs & 1, needs & 2, needs & 4, needs & 8, True, True])


TENSORS = 8  # the operator's tensor arguments, lengths and seed among them


def setup(ctx, inputs, output):
    y, _, _, *saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*inputs[:TENSORS], y, *saved)
    ctx.settings = inputs[TENSORS:]


def oracle(x, W_ih, W_hh, b, h0, c0, lengths, seed, p, variational):
    return reference.lstm(x, W_ih, W_hh, b, h0, c0, lengths, weight_drop=p, variational=variational, seed=seed)


def backward(ctx, dy, dh, dc, *_):
    *inputs, y, gates, cells = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if dy is None and dh is None and dc is None:
        return (None,) * len(needs)
    if torch.is_grad_enabled():
        return tuple(autograd.through_oracle(oracle, [*inputs, *ctx.settings], needs, (dy, dh, dc)))
    dy, dh, dc = upstream(dy, dh, dc, y, inputs[4])
    bits = sum(bit for bit, need in zip((1, 2, 4, 8), needs, strict=False) if need)
    found = torch.ops.fusedseq.lstm_backward(dy, dh, dc, *inputs, *ctx.settings, y, gates, cells, bits)
    grads = [*found, *[None] * (len(needs) - len(found))]
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


def upstream(dy, dh, dc, y, h0):
    """The gradients of y, h and c, zeros where there is none."""
    return (
        torch.zeros_like(y) if dy is None else dy,
        torch.zeros_like(h0) if dh is None else dh,
        torch.zeros_like(h0) if dc is None else dc,
    )


autograd.register("lstm", fake, backward, setup, fakes=[("lstm_backward", fake_backward)])
