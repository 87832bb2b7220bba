"""Formulas of torch.utils.flop_counter for the operators, forward and backward.

As torch does, they count a multiplication and an addition of a matrix product as two operations and
nothing else, so that operators without a product have none. A product has two gradients; a backward
is counted with all of its gradients, and products that it computes again are counted again.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from fusedseq.fused import autograd
from fusedseq.fused.schema import Named, Schema, overload

Shape = tuple[int, ...]


def _product(rows: int, W: Shape) -> int:
    """Operations of a product of `rows` rows with a weight (N, K)."""
    return 2 * rows * W[0] * W[1]


def linear(shapes: Named) -> int:
    return _product(math.prod(shapes["x"][:-1]), shapes["W"])


def attention(shapes: Named) -> int:
    """Products of q with the keys and of the probabilities with the values; masked ones count, as
    in torch's own formula."""
    B, N, L, D = shapes["q"]
    S = shapes["k"][2] if shapes.get("key_rows") is None else shapes["key_rows"][-1]
    if boundaries := shapes.get("cu_seqlens_q"):  # sequences count as padded to the longest
        B, L, S = boundaries[0] - 1, shapes["max_seqlen_q"], shapes["max_seqlen_k"]
    count: int = 2 * (2 * B * N * L * S * D)
    if relative := shapes.get("relative_keys"):
        count += _product(B * N * L, relative)
    return count


def layer(shapes: Named, suffix: str = "", x: Shape | None = None) -> int:
    """Operations of one layer of a recurrence: gates, and the rounds of a Mogrifier LSTM."""
    T, B, _ = x or shapes["x"]
    total = sum(_product(T * B, shapes[name + suffix]) for name in ("W_ih", "W_hh"))
    rounds = shapes.get("rounds" + suffix) or 0
    for name, count in (("Q", (rounds + 1) // 2), ("R", rounds // 2)):
        for factor in (name, f"{name}_factor"):
            if (weight := shapes.get(factor + suffix)) is not None:
                total += count * _product(T * B, weight[-2:])
    return total


def pair(shapes: Named) -> int:
    T, B, _ = shapes["x"]
    between = T, B, shapes["h0_first"][1]
    return layer(shapes, "_first") + layer(shapes, "_second", between)


def projected(shapes: Named) -> int:
    T, B, _ = shapes["x"]
    return layer(shapes) + _product(T * B, shapes["W_hr"])


def both_directions(shapes: Named) -> int:
    return layer(shapes) + layer(shapes, "_reverse")


def repeated(shapes: Named) -> int:
    """Operations of `gemm_rate`, which computes its product `repeats` times."""
    repeats: int = shapes["repeats"]
    return repeats * linear(shapes)


def nothing(shapes: Named) -> int:
    return 0


# {operator: (operations of its forward, of its backward as a multiple of these)}
FORMULAS: dict[str, tuple[Callable[[Named], int], float]] = {
    "linear": (linear, 2),
    # The backward computes the logits again: five products for the forward's two.
    "attention": (attention, 2.5),
    "attention_plain": (attention, 2.5),
    "gru": (layer, 2),
    "rnn": (layer, 2),
    "lstm": (layer, 2),
    "layer_norm_gru": (layer, 2),
    "layer_norm_lstm": (layer, 2),
    "peephole_lstm": (layer, 2),
    "projected_lstm": (projected, 2),
    "mogrifier_lstm": (layer, 2),
    "mogrifier_lstm_pair": (pair, 2),
    "bidirectional_lstm": (both_directions, 2),
    # Where its gradients are wanted, the forward computes them, and the backward only scales them.
    "linear_cross_entropy": (linear, 3),
    "activation_regularization": (nothing, 0),
    "bias_activation_dropout": (nothing, 0),
    "residual_layer_norm": (nothing, 0),
    "embedding": (nothing, 0),
}
# {operator without a backward: its operations}
FORWARD_ALONE: dict[str, Callable[[Named], int]] = {
    "gemm_rate": repeated,
    "dropout": nothing,
    "locked_dropout": nothing,
    "weight_drop": nothing,
    "dropout_mask": nothing,
    "linear_cross_entropy_scale": nothing,
    "attention_plan": nothing,
    "nt_asgd_norm": nothing,
    "nt_asgd_step_": nothing,
}


def _register(op: str, count: Callable[[Named], float]) -> None:
    names = Schema(op).inputs

    def formula(*shapes: Any, out_shape: Any = None, **more: Any) -> int:
        return int(count(dict(zip(names, shapes, strict=False)) | more))

    # Its import takes Triton along, which `import fusedseq` must not.
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(overload(op).overloadpacket)(formula)


def _times(factor: float, count: Callable[[Named], int]) -> Callable[[Named], float]:
    return lambda shapes: factor * count(shapes)


@functools.cache
def register() -> None:
    """Registers the formulas of all operators and of their backwards; again, it does nothing."""
    for op, (count, factor) in FORMULAS.items():
        # With `needs`, linear_cross_entropy computes its gradients in the forward.
        forward = _cross_entropy if op == "linear_cross_entropy" else count
        _register(op, forward)
        _register(f"{op}_backward", _times(factor, count))
        if op in autograd.inferring():
            _register(f"{op}_inference", count)
        if hasattr(torch.ops.fusedseq, f"{op}_int8"):
            _register(f"{op}_int8", count)
    for op, count in FORWARD_ALONE.items():
        _register(op, count)


def _cross_entropy(shapes: Named) -> int:
    return linear(shapes) * (3 if shapes["needs"] else 1)
