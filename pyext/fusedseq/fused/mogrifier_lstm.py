import torch

from fusedseq import reference
from fusedseq.fused import autograd, check
from fusedseq.fused.dropout import dropout
from fusedseq.fused.locked_dropout import locked_dropout
from fusedseq.fused.lstm import SAVED_AS_GIVEN, check_gates, fake_gradients, pad, saved_dtypes, upstream
from fusedseq.fused.lstm import fake as fake_lstm
from fusedseq.reference.mogrifier_lstm import INPUT


def mogrifier_lstm(
    x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias=None, R_bias=None, *, rounds, lengths=None, cap_input_gate=False,
    input_dropout=0.0, locked_input=False, state_dropout=0.0, zoneout_h=0.0, zoneout_c=0.0, weight_drop=0.0,
    variational=False, training=True, seed=0,
):  # fmt: skip
    """As `fusedseq.reference.mogrifier_lstm`. The whole sequence is one call; weights are packed once, each round's
    gating is done where its product is made, and each weight's gradient is one product after the loop.

    Under autocast the operands are cast to its dtype; 16-bit inputs are accumulated and carried in fp32.
    Errors: ValueError or TypeError naming the argument, for shapes, devices, dtypes other than fp32, fp64, bf16 and on
    CUDA fp16, lengths outside [0, T], probabilities outside [0, 1], rounds below 0, or rounds without weights.
    """
    inputs = arguments(
        x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias, R_bias, rounds, lengths, cap_input_gate, input_dropout, locked_input,
        state_dropout, zoneout_h, zoneout_c, weight_drop, variational, training, seed,
    )  # fmt: skip
    y, h, c, *_ = autograd.call("mogrifier_lstm", *inputs)
    return y, (h, c)


def arguments(
    x, W_ih, W_hh, b, h0, c0, Q, R, Q_bias, R_bias, rounds, lengths, cap_input_gate, input_dropout, locked_input,
    state_dropout, zoneout_h, zoneout_c, weight_drop, variational, training, seed,
):  # fmt: skip
    """The registered operator's arguments, checked; x after its dropout."""
    op = "mogrifier_lstm"
    check_gates(op, x, W_ih, W_hh, b, h0, c0, lengths)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 0 <= rounds < 64:
        raise ValueError(f"{op}: rounds must be a whole number in [0, 64), got {rounds}")
    for name, p in (("input_dropout", input_dropout), ("state_dropout", state_dropout), ("zoneout_h", zoneout_h),
                    ("zoneout_c", zoneout_c), ("weight_drop", weight_drop)):  # fmt: skip
        check.probability(op, name, p)
    seed = check.seed(op, seed, x.device)
    if training and input_dropout:
        x = (locked_dropout if locked_input else dropout)(x, input_dropout, seed + INPUT)
    X, H = x.size(2), h0.size(1)
    Q, Q_factor, Q_bias = check_rounds(op, "Q", x, Q, Q_bias, (rounds + 1) // 2, ("X", X), ("H", H))
    R, R_factor, R_bias = check_rounds(op, "R", x, R, R_bias, rounds // 2, ("H", H), ("X", X))
    if Q_factor is not None and R_factor is not None and Q_factor.size(1) != R_factor.size(1):
        raise ValueError(f"{op}: R must be of the rank of Q, {Q_factor.size(1)}, got {R_factor.size(1)}")
    if R is not None and (Q_factor is None) != (R_factor is None):
        raise ValueError(f"{op}: Q and R must both be weights or both pairs of factors, got one of each")
    tensors = autograd.autocast(
        x.device.type, x, W_ih, W_hh, b, h0, c0, lengths, Q, Q_factor, R, R_factor, Q_bias, R_bias
    )
    return (
        *tensors, seed, rounds, cap_input_gate, training, state_dropout, zoneout_h, zoneout_c, weight_drop, variational,
    )  # fmt: skip


def check_rounds(op, name, x, weight, bias, uses, out, in_):
    """The weight (or first factor), second factor and bias of the rounds on one operand; Nones where there is no round.

    out, in_: (symbol, size) of the widths
    """
    if uses == 0:
        return None, None, None
    (o, O), (i, I) = out, in_
    if weight is None:
        raise ValueError(f"{op}: {name} must be (n, {o}, {i}) with n = {uses} or 1 for these rounds, got None")
    factor, second = None, f"{name}'s second factor"
    if not isinstance(weight, torch.Tensor):
        if not isinstance(weight, (tuple, list)) or len(weight) != 2:
            raise TypeError(f"{op}: {name} must be a tensor or a pair of factors, got {type(weight).__name__}")
        weight, factor = weight
        check.tensor(op, second, factor)
    check.tensor(op, name, weight)
    x, weight, factor, bias = autograd.autocast(x.device.type, x, weight, factor, bias)
    check.like(op, x, "x", (second, f"{name}_bias"), **{name: weight, second: factor, f"{name}_bias": bias})
    n = len(weight) if weight.dim() else 0
    if n not in (1, uses):
        raise ValueError(f"{op}: {name} must have n = {uses} weights for these rounds, or 1 to share, got "
                         f"{tuple(weight.shape)}")  # fmt: skip
    if factor is None:
        check.shape(op, name, weight, f"(n, {o}, {i})", (n, O, I))
    else:
        check.dimensions(op, second, factor, f"(n, rank, {i})")
        rank = factor.size(1)
        check.shape(op, f"{name}'s first factor", weight, f"(n, {o}, rank)", (n, O, rank))
        check.shape(op, second, factor, f"(n, rank, {i})", (n, rank, I))
        if rank == 0:
            raise ValueError(f"{op}: {name}'s rank must be at least 1, got {tuple(factor.shape)}")
    if bias is not None:
        check.shape(op, f"{name}_bias", bias, f"(n, {o})", (n, O))
    return weight, factor, bias


def fake(
    x, W_ih, W_hh, b, h0, c0, lengths, Q, Q_factor, R, R_factor, Q_bias, R_bias, seed, rounds, cap_input_gate,
    training, state_dropout, zoneout_h, zoneout_c, weight_drop, variational,
):  # fmt: skip
    (T, B, X), H, (own, computing) = x.shape, h0.size(1), saved_dtypes(x)
    width = (rounds + 1) // 2 * pad(X) + rounds // 2 * pad(H)
    rank = 0 if Q_factor is None or x.device.type in SAVED_AS_GIVEN else Q_factor.size(1)
    return (
        *fake_lstm(x, W_ih, W_hh, b, h0, c0, lengths),
        x.new_empty(T, B, width, dtype=own),
        x.new_empty(rounds if rank else 0, T, B, pad(rank), dtype=computing),
    )


def fake_backward(dy, dh, dc, x, W_ih, W_hh, b, h0, c0, lengths, Q, Q_factor, R, R_factor, Q_bias, R_bias, *rest):
    needs = rest[-1]
    on_q, on_r = needs & 16, needs & 32
    return fake_gradients(
        x,
        (x, W_ih, W_hh, b, h0, c0, Q, Q_factor, R, R_factor, Q_bias, R_bias),
        (needs & 1, needs & 2, needs & 4, needs & 8, True, True, on_q, on_q, on_r, on_r, on_q, on_r),
    )


TENSORS = 14  # the operator's tensor arguments, lengths and seed among them
SEED = TENSORS - 1


def setup(ctx, inputs, output):
    y, _, _, *saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*inputs[:TENSORS], y, *saved)
    ctx.settings = inputs[TENSORS:]


def oracle(
    x, W_ih, W_hh, b, h0, c0, lengths, Q, Q_factor, R, R_factor, Q_bias, R_bias, seed, rounds, cap_input_gate,
    training, state_dropout, zoneout_h, zoneout_c, weight_drop, variational,
):  # fmt: skip
    return reference.mogrifier_lstm(
        x, W_ih, W_hh, b, h0, c0, Q if Q_factor is None else (Q, Q_factor), R if R_factor is None else (R, R_factor),
        Q_bias, R_bias, rounds=rounds, lengths=lengths, cap_input_gate=cap_input_gate, state_dropout=state_dropout,
        zoneout_h=zoneout_h, zoneout_c=zoneout_c, weight_drop=weight_drop, variational=variational, training=training,
        seed=seed,
    )  # fmt: skip


def backward(ctx, dy, dh, dc, *_):
    inputs, (y, *saved) = ctx.saved_tensors[:TENSORS], ctx.saved_tensors[TENSORS:]
    needs = ctx.needs_input_grad
    if dy is None and dh is None and dc is None:
        return (None,) * len(needs)
    if torch.is_grad_enabled():
        return tuple(autograd.through_oracle(oracle, [*inputs, *ctx.settings], needs, (dy, dh, dc)))
    dy, dh, dc = upstream(dy, dh, dc, y, inputs[4])
    bits = needed(needs[:SEED])
    found = torch.ops.fusedseq.mogrifier_lstm_backward(dy, dh, dc, *inputs, *ctx.settings, y, *saved, bits)
    grads = [*found[:6], None, *found[6:], *[None] * (len(needs) - SEED)]
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


def needed(needs):
    """The bits of csrc/recurrence_inputs.h, of the tensors up to the seed."""
    x, W_ih, W_hh, b, _, _, _, q, q_factor, r, r_factor, q_bias, r_bias = needs
    groups = (x, W_ih, W_hh, b, q or q_factor or q_bias, r or r_factor or r_bias)
    return sum(1 << i for i, need in enumerate(groups) if need)


autograd.register("mogrifier_lstm", fake, backward, setup, fakes=[("mogrifier_lstm_backward", fake_backward)])
