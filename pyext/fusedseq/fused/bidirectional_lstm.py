from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autocast, autograd, check, int8_weight
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.lstm import CELL, lstm
from fusedseq.fused.recurrence import check_sequence
from fusedseq.fused.schema import Named, Schema
from fusedseq.fused.through_oracle import call_reference
from fusedseq.reference.bidirectional_lstm import State

OP = "bidirectional_lstm"
# The arguments that each direction has for itself; those of the reverse one have a suffix.
OF_A_DIRECTION = ("x", "W_ih", "W_hh", "b", "h0", "c0", "starts", "seed")
TOGETHER = {"cpu"}  # device types whose kernels run both directions at the same time


def bidirectional_lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    W_ih_reverse: Tensor,
    W_hh_reverse: Tensor,
    b_reverse: Tensor | None,
    h0_reverse: Tensor,
    c0_reverse: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    starts: Tensor | None = None,
    starts_reverse: Tensor | None = None,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
    seed_reverse: int | Tensor = 0,
) -> tuple[Tensor, tuple[State, State]]:
    """Computes `fusedseq.reference.bidirectional_lstm`, on the CPU with one kernel call.

    On the CPU the two directions run at the same time, each on half of the threads: a step has
    fewer threads that wait for each other, and with two threads none. An odd number of threads
    computes one direction after the other. On CUDA, and with weights in 8 bits, this is two calls
    of `lstm`.

    Errors: those of `lstm` for either direction; ValueError for states of the two directions with
    different shapes.
    """
    forward: Named = {"W_ih": W_ih, "W_hh": W_hh, "b": b, "h0": h0, "c0": c0}
    reverse: Named = {
        "W_ih": W_ih_reverse,
        "W_hh": W_hh_reverse,
        "b": b_reverse,
        "h0": h0_reverse,
        "c0": c0_reverse,
    }
    lengths = check_sequence(OP, x, forward, lengths)
    check_sequence(OP, x, reverse, None, suffix="_reverse")
    check.shape(OP, "h0_reverse", h0_reverse, "(B, H)", tuple(h0.shape))
    check.starts(OP, starts, x)
    check.starts(OP, starts_reverse, x, "starts_reverse")
    check.probability(OP, "weight_drop", weight_drop)
    check.flags(OP, variational=variational, training=training)
    weight_drop = weight_drop if training else 0.0
    options: Named = {"lengths": lengths, "weight_drop": weight_drop, "variational": variational}
    weights = W_ih, W_hh, W_ih_reverse, W_hh_reverse
    if x.device.type not in TOGETHER or any(int8_weight.parts(W) for W in weights):
        options["training"] = training
        y, state = lstm(x, **forward, **options, starts=starts, seed=seed)
        options |= {"starts": starts_reverse, "seed": seed_reverse, "reverse": True}
        y_reverse, state_reverse = lstm(x, **reverse, **options)
        return torch.cat([y, y_reverse], -1), (state, state_reverse)
    named = forward | {f"{name}_reverse": value for name, value in reverse.items()}
    x, *cast = autocast.cast(x.device.type, x, *named.values())
    named = options | dict(zip(named, cast, strict=True)) | {"x": x, "x_reverse": x}
    named |= {"starts": starts, "starts_reverse": starts_reverse}
    for name, value in (("seed", seed), ("seed_reverse", seed_reverse)):
        named[name] = check.seed(OP, value, x.device, name) if weight_drop else None
    found = dict(zip(OUTPUTS, autograd.call_by_name(OP, named), strict=True))
    y = torch.cat([found["y"], found["y_reverse"]], -1)
    return y, ((found["h"], found["c"]), (found["h_reverse"], found["c_reverse"]))


def directions(named: Named) -> tuple[Named, Named]:
    """Returns the arguments of each direction as those of `lstm`."""
    shared = "lengths", "weight_drop", "variational"
    forward = {name: named[name] for name in (*OF_A_DIRECTION, *shared)}
    reverse = {name: named[f"{name}_reverse"] for name in OF_A_DIRECTION}
    return forward, {**forward, **reverse, "reverse": True}


def fake(named: Named) -> tuple[Tensor, ...]:
    forward, reverse = directions(named)
    return *CELL.fake(forward), *CELL.fake(reverse)


def oracle(named: Named) -> Any:
    return [call_reference(reference.lstm, direction) for direction in directions(named)]


OUTPUTS = Schema(OP).outputs
RESULTS = tuple(f"{name}{suffix}" for suffix in ("", "_reverse") for name in ("y", "h", "c"))
autograd.register(
    OP, fake, Gradient(results=RESULTS, backwards=(f"{OP}_backward",), oracle=oracle, loops=True)
)
autograd.register_fake_backward(OP)
