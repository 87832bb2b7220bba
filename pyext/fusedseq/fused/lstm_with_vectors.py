"""What the LSTMs with parameter vectors of their own have in common: peephole_lstm and
layer_norm_lstm.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedseq.fused import autocast, autograd, check, int8_weight
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.lstm import check_sequence, unchecked
from fusedseq.fused.schema import Named

VECTORS = {  # {operator: {its vector: elements for each hidden unit}}
    "layer_norm_lstm": {"gamma_ih": 4, "gamma_hh": 4, "gamma_c": 1, "beta_c": 1},
    "peephole_lstm": {"peephole": 3},
}
TENSORS = ("W_ih", "W_hh", "b", "h0", "c0")
FLAGS = ("reverse", "variational", "training")


def call(op: str, given: Named) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Checks the arguments of an operator, by name, and computes it.

    returns y: (T, B, H), (h, c): (B, H) each
    """
    a = dict(given)
    found = unchecked(op, a, VECTORS[op] if op == "layer_norm_lstm" else None)
    if found is not NotImplemented:
        y, h, c, *_ = found
        return y, (h, c)
    names = (*TENSORS, *VECTORS[op])
    a["lengths"] = check_sequence(op, 4, 4, a["x"], {name: a[name] for name in names}, a["lengths"])
    x, H = a["x"], a["h0"].size(1)
    for name, n in VECTORS[op].items():
        check.shape(op, name, a[name], "(H,)" if n == 1 else f"({n}H,)", (n * H,))
    check.starts(op, a["starts"], x)
    for name in ("zoneout_h", "zoneout_c", "weight_drop"):
        check.probability(op, name, a[name])
    check.flags(op, **{name: a[name] for name in FLAGS})
    if not a["training"]:
        a["weight_drop"] = 0.0
    has_mask = a["weight_drop"] or a["zoneout_h"] or a["zoneout_c"]
    a["seed"] = check.seed(op, a["seed"], x.device) if has_mask else None
    cast = autocast.cast(x.device.type, *(a[name] for name in ("x", *names)))
    a |= dict(zip(("x", *names), cast, strict=True))
    if op == "layer_norm_lstm":
        a["norm"] = torch.cat([a[name] for name in VECTORS[op]])
    weights = a["W_ih"], a["W_hh"]
    others = [a[name] for name in names if name not in ("W_ih", "W_hh")]
    if int8_weight.has_recurrence(a["x"], weights, others, is_random=a["training"] and has_mask):
        y, h, c = int8_weight.call(op, a, ("W_ih", "W_hh"))
        return y, (h, c)
    a["W_ih"], a["W_hh"] = int8_weight.dequantized(*weights)
    y, h, c, *_ = autograd.call_by_name(op, a)
    return y, (h, c)


def register(
    op: str, fake: Callable[[Named], tuple[Tensor, ...]], oracle: Callable[[Named], Any]
) -> None:
    """Registers the shapes of an operator's results, and its gradients."""
    gradient = Gradient(
        results=("y", "h", "c"), backwards=(f"{op}_backward",), oracle=oracle, loops=True
    )
    autograd.register(op, fake, gradient)
    autograd.register_fake_backward(op)
