from collections.abc import Sequence

from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autocast, autograd, check, cudnn_recurrence, int8_weight, lstm_cudnn
from fusedseq.fused.recurrence import check_sequence, draws_nothing, is_zero
from fusedseq.fused.recurrent_cell import Cell, register
from fusedseq.fused.schema import Named
from fusedseq.reference.steps import flip_sequences

OP = "lstm"
CELL = Cell(OP, gates=4, biases=4, saved=4, has_c=True)
# The inputs of mogrifier_lstm with which it is an LSTM.
WITHOUT_ROUNDS: Named = {
    **dict.fromkeys(("Q", "Q_factor", "R", "R_factor", "Q_bias", "R_bias")),
    "rounds": 0,
    "cap_input_gate": False,
    "state_dropout": 0.0,
}
MOGRIFIER_WEIGHTS = ("W_ih", "W_hh", "Q", "R", "Q_factor", "R_factor")


def lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes `fusedseq.reference.lstm` with one kernel call for the whole sequence.

    The product of the inputs with W_ih is computed for all time steps at once, the weights are
    packed once per call, and the gradient of each weight is one matrix product after the loop over
    time. On CUDA, calls that cuDNN's persistent kernel supports (fp16, certain sizes) are computed
    by cuDNN, and so are calls in fp32, bf16 and fp16 without lengths, weight drop, `starts` and
    `reverse` that no persistent kernel of this package can run, unless torch uses deterministic
    algorithms only. Calls with `starts` have persistent kernels of their own, and calls with
    `reverse` alone compute a reversed copy of x. On every device, a call with a zoneout runs the
    kernels of `mogrifier_lstm` without rounds, which is an LSTM, and never cuDNN. `fused.explain`
    reports which kernel a call runs.

    Autocast casts the operands to its dtype. 16-bit inputs are accumulated in fp32, and the state
    is carried in fp32. Weights in 8 bits (`fusedseq.quantize_`) are multiplied as they are in
    inference on the CPU; where a gradient is recorded or a mask is drawn, in fp64 and on CUDA they
    are converted first.

    Errors: ValueError or TypeError naming the argument, for a wrong shape, device or dtype (fp32,
    fp64, bf16, and fp16 on CUDA are supported), sizes T, X or H of 0 (B may be 0), lengths outside
    [0, T], or probabilities outside [0, 1].
    """
    if draws_nothing(weight_drop, training) and is_zero(zoneout_h) and is_zero(zoneout_c):
        layer = W_ih, W_hh, b, h0, c0, lengths
        found = int8_weight.call_if_valid(OP, x, starts, reverse, *layer, None, 0.0, variational)
        if found is not NotImplemented:
            y, h, c, *_ = found
            return y, (h, c)
    tensors: Named = {"W_ih": W_ih, "W_hh": W_hh, "b": b, "h0": h0, "c0": c0}
    lengths = check_sequence(OP, x, tensors, lengths)
    check.starts(OP, starts, x)
    check.probability(OP, "zoneout_h", zoneout_h)
    check.probability(OP, "zoneout_c", zoneout_c)
    check.probability(OP, "weight_drop", weight_drop)
    check.flags(OP, reverse=reverse, variational=variational, training=training)
    weight_drop = weight_drop if training else 0.0
    has_zoneout = bool(zoneout_h or zoneout_c)
    # Without a mask no seed is needed, and copying one to a GPU would synchronize.
    has_mask = weight_drop or has_zoneout
    seed = check.seed(OP, seed, x.device) if has_mask else None  # type: ignore[assignment]
    x, W_ih, W_hh, b, h0, c0 = autocast.cast(x.device.type, x, W_ih, W_hh, b, h0, c0)
    is_random = weight_drop or (training and has_zoneout)
    named: Named = {
        "x": x,
        "W_ih": W_ih,
        "W_hh": W_hh,
        "b": b,
        "h0": h0,
        "c0": c0,
        "lengths": lengths,
        "starts": starts,
        "reverse": reverse,
        "zoneout_h": zoneout_h,
        "zoneout_c": zoneout_c,
        "weight_drop": weight_drop,
        "variational": variational,
        "training": training,
        "seed": seed,
    }
    if int8_weight.has_recurrence(x, (W_ih, W_hh), (b, h0, c0), is_random):
        if has_zoneout:
            y, h, c = int8_weight.call("mogrifier_lstm", named | WITHOUT_ROUNDS, MOGRIFIER_WEIGHTS)
        else:
            y, h, c = int8_weight.call(OP, named, ("W_ih", "W_hh"))
        return y, (h, c)
    W_ih, W_hh = int8_weight.dequantized(W_ih, W_hh)
    named |= {"W_ih": W_ih, "W_hh": W_hh}
    if lstm_cudnn.is_flipped(x, starts, reverse):
        y, (h, c) = lstm(
            flip_sequences(x, lengths),
            *(W_ih, W_hh, b, h0, c0),
            lengths=lengths,
            zoneout_h=zoneout_h,
            zoneout_c=zoneout_c,
            weight_drop=weight_drop,
            variational=variational,
            seed=seed,
            training=training,
        )
        return flip_sequences(y, lengths), (h, c)
    if has_zoneout:
        y, h, c, *_ = autograd.call_by_name("mogrifier_lstm", named | WITHOUT_ROUNDS)
        return y, (h, c)
    if lstm_cudnn.supports(x, W_ih, W_hh, b, h0, c0, lengths, weight_drop, starts, reverse):
        mode = cudnn_recurrence.LSTM
        y, h, c = cudnn_recurrence.call(mode, reference.lstm, x, W_ih, W_hh, b, h0, c0)
    else:
        y, h, c, *_ = autograd.call_by_name(OP, named)
    return y, (h, c)


register(CELL, reference.lstm)
