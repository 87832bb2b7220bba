from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autocast, autograd, check, cudnn_recurrence, int8_weight, lstm_cudnn
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.schema import Named
from fusedseq.fused.through_oracle import call_reference
from fusedseq.fused.transforms import is_transformed
from fusedseq.reference.steps import flip_sequences

OP = "lstm"
# Devices whose kernels save activations in the dtype of x, and save nothing for low-rank weights.
SAVED_IN_DTYPE_OF_X = {"cuda"}
# The inputs of mogrifier_lstm with which it is an LSTM.
WITHOUT_ROUNDS: Named = {
    **dict.fromkeys(("Q", "Q_factor", "R", "R_factor", "Q_bias", "R_bias")),
    "rounds": 0,
    "cap_input_gate": False,
    "state_dropout": 0.0,
}
MOGRIFIER_WEIGHTS = ("W_ih", "W_hh", "Q", "R", "Q_factor", "R_factor")
PAD = 16  # Saved rows are padded to a multiple of this many elements: csrc/cpu/arguments.


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
        found = int8_weight.unchecked(OP, x, starts, reverse, *layer, None, 0.0, variational)
        if found is not NotImplemented:
            y, h, c, *_ = found
            return y, (h, c)
    lengths = check_layer(OP, x, W_ih, W_hh, b, h0, c0, lengths)
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


def is_zero(p: Any) -> bool:
    return isinstance(p, (float, int)) and p == 0


def draws_nothing(p: Any, training: Any) -> bool:
    """Whether a valid probability of dropping is without effect."""
    return isinstance(p, (float, int)) and (p == 0 or (training is False and 0 <= p <= 1))


def unchecked(op: str, a: Named, vectors: Mapping[str, int] | None = None) -> Any:
    """`int8_weight.unchecked` of a recurrence that draws no masks, and NotImplemented for others.

    a: the arguments of the public function by name
    vectors: the parameter vectors that make up the input `norm`, in order, and their elements for
        each hidden unit
    """
    has_zoneout = not (is_zero(a["zoneout_h"]) and is_zero(a.get("zoneout_c", 0.0)))
    if has_zoneout or not draws_nothing(a["weight_drop"], a["training"]):
        return NotImplemented
    inputs = a | {"weight_drop": 0.0, "seed": None}
    if vectors:
        x, h0, parts = a["x"], a["h0"], [a[name] for name in vectors]
        if is_transformed() or not all(isinstance(t, Tensor) for t in (x, h0, *parts)):
            return NotImplemented
        device = x.device.type
        if device not in autograd.CHECKED_IN_CPP or not autograd.recorder or autocast.is_on(device):
            return NotImplemented  # before the vectors are joined
        kind, H = (x.dtype, x.device), h0.shape[-1] if h0.dim() else 0
        for t, n in zip(parts, vectors.values(), strict=True):
            if t.shape != (n * H,) or (t.dtype, t.device) != kind:
                return NotImplemented
        inputs["norm"] = torch.cat(parts)
    return int8_weight.unchecked_by_name(op, inputs)


def check_layer(
    op: str, x: Any, W_ih: Any, W_hh: Any, b: Any, h0: Any, c0: Any, lengths: Any
) -> Tensor | None:
    """The checks that lstm and mogrifier_lstm have in common. Returns lengths as the registered
    operators take them.
    """
    tensors = {"W_ih": W_ih, "W_hh": W_hh, "b": b, "h0": h0, "c0": c0}
    return check_sequence(op, 4, 4, x, tensors, lengths)


def check_sequence(
    op: str, gates: int, slots: int, x: Any, tensors: Named, lengths: Any, suffix: str = ""
) -> Tensor | None:
    """The checks of the tensors of a recurrence. Returns lengths as the registered operators take
    them.

    gates, slots: the rows of W_ih and W_hh, and of b, for each hidden unit
    tensors: W_ih, W_hh, b, h0 and, where the cell has it, c0
    suffix: of their names in error messages
    """
    check.tensor(op, "x", x)
    x, *cast = autocast.cast(x.device.type, x, *tensors.values())
    tensors = dict(zip(tensors, cast, strict=True))
    named = {f"{name}{suffix}": value for name, value in tensors.items()}
    check.like(op, x, "x", (f"b{suffix}",), **named)
    h0, b = tensors["h0"], tensors["b"]
    check.dimensions(op, "x", x, "(T, B, X)")
    check.dimensions(op, f"h0{suffix}", h0, "(B, H)")
    (T, B, X), H = x.shape, h0.size(1)
    if T == 0 or X == 0 or H == 0:
        raise ValueError(
            f"{op}: x must be (T, B, X) and h0{suffix} (B, H) with T, X and H at least 1, got "
            f"{tuple(x.shape)} and {tuple(h0.shape)}"
        )
    rows = "H" if gates == 1 else f"{gates}H"
    check.shape(op, f"h0{suffix}", h0, "(B, H)", (B, H))
    if "c0" in tensors:
        check.shape(op, f"c0{suffix}", tensors["c0"], "(B, H)", (B, H))
    check.shape(op, f"W_ih{suffix}", tensors["W_ih"], f"({rows}, X)", (gates * H, X))
    check.shape(op, f"W_hh{suffix}", tensors["W_hh"], f"({rows}, H)", (gates * H, H))
    if b is not None:
        check.shape(op, f"b{suffix}", b, "(H,)" if slots == 1 else f"({slots}H,)", (slots * H,))
    return None if lengths is None else check.lengths(op, "lengths", lengths, x, "x", B, T, "T")


def pad(n: int) -> int:
    return (n + PAD - 1) // PAD * PAD


def saved_dtypes(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtype in which the kernels save activations, and the one in which they compute and save
    the state c.
    """
    computing = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.dtype if x.device.type in SAVED_IN_DTYPE_OF_X else computing, computing


def fake(named: Named) -> tuple[Tensor, ...]:
    x, h0 = named["x"], named["h0"]
    (T, B, _), H, (activations, computing) = x.shape, h0.size(1), saved_dtypes(x)
    return (
        x.new_empty(T, B, H),
        x.new_empty(B, H),
        x.new_empty(B, H),
        x.new_empty(T, B, 4, pad(H), dtype=activations),
        x.new_empty(T, B, pad(H), dtype=computing),
    )


def oracle(named: Named) -> Any:
    return call_reference(reference.lstm, named)


autograd.register(
    OP,
    fake,
    Gradient(results=("y", "h", "c"), backwards=("lstm_backward",), oracle=oracle, loops=True),
)
autograd.register_fake_backward(OP)
