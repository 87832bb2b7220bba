from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autocast, autograd, check, int8_weight
from fusedseq.fused.dropout import dropout
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.locked_dropout import locked_dropout
from fusedseq.fused.lstm import CELL, MOGRIFIER_WEIGHTS
from fusedseq.fused.recurrence import (
    SAVED_IN_DTYPE_OF_X,
    check_sequence,
    draws_nothing,
    is_zero,
    pad,
    saved_dtypes,
)
from fusedseq.fused.schema import Named
from fusedseq.fused.through_oracle import call_reference
from fusedseq.reference.mogrifier_lstm import Weight

OP = "mogrifier_lstm"
DROPOUTS = ("input_dropout", "state_dropout", "weight_drop")  # which only training draws
PROBABILITIES = (*DROPOUTS, "zoneout_h", "zoneout_c")
FLAGS = ("reverse", "cap_input_gate", "locked_input", "variational", "training")
WITHOUT_MASKS: Named = dict.fromkeys(DROPOUTS, 0.0) | {"seed": None}


def mogrifier_lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    Q: Weight | None,
    R: Weight | None,
    Q_bias: Tensor | None = None,
    R_bias: Tensor | None = None,
    *,
    rounds: int,
    lengths: Tensor | Sequence[int] | None = None,
    starts: Tensor | None = None,
    reverse: bool = False,
    cap_input_gate: bool = False,
    input_dropout: float = 0.0,
    locked_input: bool = False,
    state_dropout: float = 0.0,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes `fusedseq.reference.mogrifier_lstm` with one kernel call for the whole sequence.

    The weights are packed once per call, the gating of each round is applied where its product is
    computed, and the gradient of each weight is one matrix product after the loop over time.

    On CUDA, calls with rounds that have `starts` or `reverse` run the loop, as the persistent
    kernels with rounds have neither.

    Autocast casts the operands to its dtype. 16-bit inputs are accumulated in fp32, and the state
    is carried in fp32. Weights in 8 bits (`fusedseq.quantize_`) are multiplied as they are in
    inference on the CPU; where a gradient is recorded or a mask is drawn, in fp64 and on CUDA they
    are converted first.

    Errors: ValueError or TypeError naming the argument, for a wrong shape, device or dtype (fp32,
    fp64, bf16, and fp16 on CUDA are supported), sizes T, X or H of 0 (B may be 0), lengths outside
    [0, T], probabilities outside [0, 1], rounds outside [0, 64), or rounds without weights.
    """
    given: Named = {
        "x": x,
        "W_ih": W_ih,
        "W_hh": W_hh,
        "b": b,
        "h0": h0,
        "c0": c0,
        "Q": Q,
        "R": R,
        "Q_bias": Q_bias,
        "R_bias": R_bias,
        "rounds": rounds,
        "lengths": lengths,
        "starts": starts,
        "reverse": reverse,
        "cap_input_gate": cap_input_gate,
        "input_dropout": input_dropout,
        "locked_input": locked_input,
        "state_dropout": state_dropout,
        "zoneout_h": zoneout_h,
        "zoneout_c": zoneout_c,
        "weight_drop": weight_drop,
        "variational": variational,
        "training": training,
        "seed": seed,
    }
    return computed(given)


def computed(given: Named) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`mogrifier_lstm` of its arguments by name."""
    has_zoneout = not (is_zero(given["zoneout_h"]) and is_zero(given["zoneout_c"]))
    types = type(given["seed"]), type(given["locked_input"])  # which the operator does not check
    needs_no_check = types == (int, bool) and not has_zoneout
    if needs_no_check and all(draws_nothing(given[p], given["training"]) for p in DROPOUTS):
        of_full_rank: Named = {"Q_factor": None, "R_factor": None}
        found = int8_weight.call_by_name_if_valid(OP, given | WITHOUT_MASKS | of_full_rank)
        if found is not NotImplemented:
            y, h, c, *_ = found
            return y, (h, c)
    a = operator_inputs(given)
    weights = [a[name] for name in MOGRIFIER_WEIGHTS]
    others = [a[name] for name in ("b", "h0", "c0", "Q_bias", "R_bias")]
    is_random = a["training"] and any(a[name] for name in PROBABILITIES)
    if int8_weight.has_recurrence(a["x"], weights, others, is_random):
        y, h, c = int8_weight.call(OP, a, MOGRIFIER_WEIGHTS)
        return y, (h, c)
    a |= dict(zip(MOGRIFIER_WEIGHTS, int8_weight.dequantized(*weights), strict=True))
    y, h, c, *_ = autograd.call_by_name(OP, a)
    return y, (h, c)


def operator_inputs(given: Named) -> Named:
    """The registered operator's inputs by name, checked, from the arguments of `mogrifier_lstm` by
    name.

    They differ in x, which has had its dropout, in lengths and the seed, which become int64 tensors
    on the device of x, and in low-rank weights, whose pair of factors becomes two inputs.
    """
    a = dict(given)
    tensors = {name: a[name] for name in ("W_ih", "W_hh", "b", "h0", "c0")}
    a["lengths"] = check_sequence(OP, a["x"], tensors, a["lengths"])
    check.starts(OP, a["starts"], a["x"])
    rounds, x = a["rounds"], a["x"]
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 0 <= rounds < 64:
        raise ValueError(f"{OP}: rounds must be a whole number in [0, 64), got {rounds}")
    for name in PROBABILITIES:
        check.probability(OP, name, a[name])
    check.flags(OP, **{name: a[name] for name in FLAGS})
    a["seed"] = check.seed(OP, a["seed"], x.device)
    if a["training"] and a["input_dropout"]:
        drop = locked_dropout if a["locked_input"] else dropout
        a["x"] = x = drop(x, a["input_dropout"], a["seed"])
    X, H = ("X", x.size(2)), ("H", a["h0"].size(1))
    set_rounds(a, "Q", (rounds + 1) // 2, X, H)
    set_rounds(a, "R", rounds // 2, H, X)
    Q_factor, R_factor = a["Q_factor"], a["R_factor"]
    if Q_factor is not None and R_factor is not None and Q_factor.size(1) != R_factor.size(1):
        raise ValueError(
            f"{OP}: R must be of the rank of Q, {Q_factor.size(1)}, got {R_factor.size(1)}"
        )
    if a["R"] is not None and (Q_factor is None) != (R_factor is None):
        raise ValueError(
            f"{OP}: Q and R must both be weights or both pairs of factors, got one of each"
        )
    given_tensors = [name for name, value in a.items() if isinstance(value, Tensor)]
    cast = autocast.cast(x.device.type, *(a[name] for name in given_tensors))
    return a | dict(zip(given_tensors, cast, strict=True))


def set_rounds(a: Named, name: str, uses: int, out: tuple[str, int], in_: tuple[str, int]) -> None:
    """Checks the weights of the rounds on one operand, Q or R, and sets the entries `name`,
    `name`_factor and `name`_bias.

    They are None where there are no such rounds.
    uses: the number of these rounds    out, in_: (symbol, size) of a weight's two dimensions
    """
    weight, bias = a[name], a[f"{name}_bias"]
    a[name] = a[f"{name}_factor"] = a[f"{name}_bias"] = None
    if uses == 0:
        return
    (o, O), (i, I) = out, in_
    if weight is None:
        raise ValueError(
            f"{OP}: {name} must be (n, {o}, {i}) with n = {uses} or 1 for these rounds, got None"
        )
    factor, second = None, f"{name}'s second factor"
    if not isinstance(weight, Tensor):
        if not isinstance(weight, (tuple, list)) or len(weight) != 2:
            raise TypeError(
                f"{OP}: {name} must be a tensor or a pair of factors, got {type(weight).__name__}"
            )
        weight, factor = weight
        check.tensor(OP, second, factor)
    check.tensor(OP, name, weight)
    x, weight, factor, bias = autocast.cast(a["x"].device.type, a["x"], weight, factor, bias)
    others = {name: weight, second: factor, f"{name}_bias": bias}
    check.like(OP, x, "x", (second, f"{name}_bias"), **others)
    n = len(weight) if weight.dim() else 0
    if n not in (1, uses):
        raise ValueError(
            f"{OP}: {name} must have n = {uses} weights for these rounds, or 1 to share, got "
            f"{tuple(weight.shape)}"
        )
    if factor is None:
        check.shape(OP, name, weight, f"(n, {o}, {i})", (n, O, I))
    else:
        check.dimensions(OP, second, factor, f"(n, rank, {i})")
        rank = factor.size(1)
        check.shape(OP, f"{name}'s first factor", weight, f"(n, {o}, rank)", (n, O, rank))
        check.shape(OP, second, factor, f"(n, rank, {i})", (n, rank, I))
        if rank == 0:
            raise ValueError(f"{OP}: {name}'s rank must be at least 1, got {tuple(factor.shape)}")
    if bias is not None:
        check.shape(OP, f"{name}_bias", bias, f"(n, {o})", (n, O))
    a[name], a[f"{name}_factor"], a[f"{name}_bias"] = weight, factor, bias


def fake(named: Named) -> tuple[Tensor, ...]:
    x, rounds, Q_factor = named["x"], named["rounds"], named["Q_factor"]
    (T, B, X), H = x.shape, named["h0"].size(1)
    activations, computing = saved_dtypes(x)
    width = (rounds + 1) // 2 * pad(X) + rounds // 2 * pad(H)
    saves_factors = Q_factor is not None and x.device.type not in SAVED_IN_DTYPE_OF_X
    rank = Q_factor.size(1) if saves_factors else 0
    return (
        *CELL.fake(named),
        x.new_empty(T, B, width, dtype=activations),
        x.new_empty(rounds if rank else 0, T, B, pad(rank), dtype=computing),
    )


def oracle(named: Named) -> Any:
    factors = {
        name: (named[name], named[f"{name}_factor"])
        for name in ("Q", "R")
        if named[f"{name}_factor"] is not None
    }
    return call_reference(reference.mogrifier_lstm, named | factors)


autograd.register(
    OP,
    fake,
    Gradient(
        results=("y", "h", "c"), backwards=("mogrifier_lstm_backward",), oracle=oracle, loops=True
    ),
)
autograd.register_fake_backward(OP)
