from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedseq import reference
from fusedseq.fused import autocast, autograd, check, int8_weight
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.linear import linear
from fusedseq.fused.lstm import lstm
from fusedseq.fused.recurrence import pad, saved_dtypes
from fusedseq.fused.schema import Named
from fusedseq.fused.through_oracle import call_reference
from fusedseq.reference.dropout_mask import WEIGHT
from fusedseq.reference.weight_drop import drop_weight

OP = "projected_lstm"
DEVICES = {"cpu"}  # that have kernels for it
TENSORS = ("W_ih", "W_hh", "W_hr", "b", "h0", "c0")


def projected_lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    W_hr: Tensor,
    b: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_c: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes `fusedseq.reference.projected_lstm` with one kernel call for the whole sequence, as
    `lstm`: on the CPU each step multiplies by W_hr after its cells.

    On CUDA this is a call of `lstm` whose recurrent weight is the product of W_hh and W_hr: it has
    H / P times the operations of the recurrent product.

    Errors: those of `lstm`.
    """
    given = dict(zip(TENSORS, (W_ih, W_hh, W_hr, b, h0, c0), strict=True))
    lengths = check_layer(x, given, lengths)
    check.starts(OP, starts, x)
    check.probability(OP, "zoneout_c", zoneout_c)
    check.probability(OP, "weight_drop", weight_drop)
    check.flags(OP, reverse=reverse, variational=variational, training=training)
    weight_drop = weight_drop if training else 0.0
    has_mask = weight_drop or zoneout_c
    x, *cast = autocast.cast(x.device.type, x, *given.values())
    named: Named = dict(zip(TENSORS, int8_weight.dequantized(*cast), strict=True))
    named |= {
        "x": x,
        "lengths": lengths,
        "starts": starts,
        "reverse": reverse,
        "zoneout_c": zoneout_c,
        "weight_drop": weight_drop,
        "variational": variational,
        "training": training,
        "seed": check.seed(OP, seed, x.device) if has_mask else None,
    }
    if x.device.type not in DEVICES:
        return by_lstm(named)
    y, h, c, *_ = autograd.call_by_name(OP, named)
    return y, (h, c)


def check_layer(x: Any, tensors: Named, lengths: Any) -> Tensor | None:
    """Checks the tensors, and returns lengths as the registered operator takes them."""
    check.tensor(OP, "x", x)
    x, *cast = autocast.cast(x.device.type, x, *tensors.values())
    tensors = dict(zip(tensors, cast, strict=True))
    check.like(OP, x, "x", ("b",), **tensors)
    check.dimensions(OP, "x", x, "(T, B, X)")
    check.dimensions(OP, "W_hr", tensors["W_hr"], "(P, H)")
    (T, B, X), (P, H) = x.shape, tensors["W_hr"].shape
    if 0 in (T, X, P, H):
        raise ValueError(
            f"{OP}: x must be (T, B, X) and W_hr (P, H) with T, X, P and H at least 1, got "
            f"{tuple(x.shape)} and {(P, H)}"
        )
    check.shape(OP, "h0", tensors["h0"], "(B, P)", (B, P))
    check.shape(OP, "c0", tensors["c0"], "(B, H)", (B, H))
    check.shape(OP, "W_ih", tensors["W_ih"], "(4H, X)", (4 * H, X))
    check.shape(OP, "W_hh", tensors["W_hh"], "(4H, P)", (4 * H, P))
    if tensors["b"] is not None:
        check.shape(OP, "b", tensors["b"], "(4H,)", (4 * H,))
    return None if lengths is None else check.lengths(OP, "lengths", lengths, x, "x", B, T, "T")


def by_lstm(a: Named) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes a call by `lstm`.    a: the checked arguments by name

    h is the projection of h' = o tanh(c'). W_hh h = (W_hh W_hr) h', so that this is an LSTM over h'
    whose recurrent weight is that product. h0 is no projection of an h'. Its product with W_hh
    belongs to the first step of each sequence, so it becomes a part of the input there.
    """
    x, W_hh, W_hr, h0, starts, lengths = (
        a[name] for name in ("x", "W_hh", "W_hr", "h0", "starts", "lengths")
    )
    if a["weight_drop"]:
        W_hh = drop_weight(WEIGHT, W_hh, a["weight_drop"], a["seed"], a["variational"])
    T, B, _ = x.shape
    ends = torch.full((B,), T, device=x.device) if lengths is None else lengths
    first = (ends - 1).clamp(min=0) if a["reverse"] else torch.zeros_like(ends)
    rows = torch.arange(B, device=x.device)
    carried = h0 if starts is None else h0.masked_fill(starts[first, rows][:, None], 0.0)
    at_first = x.new_zeros(T, B, h0.size(1)).index_put((first, rows), carried)
    y, (h, c) = lstm(
        torch.cat([x, at_first], 2),
        torch.cat([a["W_ih"], W_hh], 1),
        W_hh @ W_hr,
        a["b"],
        h0.new_zeros(B, W_hr.size(1)),
        a["c0"],
        lengths,
        starts=starts,
        reverse=a["reverse"],
        zoneout_c=a["zoneout_c"],
        training=a["training"],
        seed=0 if a["seed"] is None else a["seed"],
    )
    projected = linear(h, W_hr)
    if lengths is not None:  # a sequence without steps retains its state
        projected = torch.where(lengths[:, None] > 0, projected, h0)
    return linear(y, W_hr), (projected, c)


def arguments_of_lstm(a: Named) -> Named:
    """The arguments of the `lstm` that `by_lstm` calls, by name; its tensors have the right shapes
    and undefined values.    a: the arguments of the call by name, defaults included
    """
    (T, B, X), (P, H) = a["x"].shape, a["W_hr"].shape
    kept = ("b", "c0", "lengths", "starts", "reverse", "zoneout_c", "training")
    return {
        "x": a["x"].new_empty(T, B, X + P),
        "W_ih": a["x"].new_empty(4 * H, X + P),
        "W_hh": a["x"].new_empty(4 * H, H),
        "h0": a["x"].new_empty(B, H),
        **{name: a[name] for name in kept},
    }


def fake(named: Named) -> tuple[Tensor, ...]:
    x, W_hr = named["x"], named["W_hr"]
    (T, B, _), (P, H), (activations, computing) = x.shape, W_hr.shape, saved_dtypes(x)
    return (
        x.new_empty(T, B, P),
        x.new_empty(B, P),
        x.new_empty(B, H),
        x.new_empty(T, B, 4, pad(H), dtype=activations),
        x.new_empty(T, B, pad(H), dtype=computing),
    )


def oracle(named: Named) -> Any:
    return call_reference(reference.projected_lstm, named)


autograd.register(
    OP,
    fake,
    Gradient(results=("y", "h", "c"), backwards=(f"{OP}_backward",), oracle=oracle, loops=True),
)
autograd.register_fake_backward(OP)
