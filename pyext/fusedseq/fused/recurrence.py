"""What all recurrent operators have in common: the checks of their tensors, and the sizes and
dtypes of what they save for a backward.
"""

from typing import Any

import torch
from torch import Tensor

from fusedseq.fused import autocast, check
from fusedseq.fused.schema import Named

# Devices whose kernels save activations in the dtype of x, and save nothing for low-rank weights.
SAVED_IN_DTYPE_OF_X = {"cuda"}
PAD = 16  # Saved rows are padded to a multiple of this many elements: csrc/cpu/arguments.


def check_sequence(
    op: str,
    x: Any,
    tensors: Named,
    lengths: Any,
    *,
    gates: int = 4,
    biases: int = 4,
    suffix: str = "",
) -> Tensor | None:
    """Checks the tensors of one direction of a recurrence. Returns lengths as the registered
    operators take them.

    tensors: W_ih, W_hh, b, h0 and, where the state has it, c0; others are checked for their dtype
        and device alone
    gates, biases: the rows of W_ih and W_hh, and the elements of b, for each hidden unit
    suffix: of the tensors' names in error messages
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
    check.shape(op, f"h0{suffix}", h0, "(B, H)", (B, H))
    if "c0" in tensors:
        check.shape(op, f"c0{suffix}", tensors["c0"], "(B, H)", (B, H))
    rows = multiple_of_H(gates)
    check.shape(op, f"W_ih{suffix}", tensors["W_ih"], f"({rows}, X)", (gates * H, X))
    check.shape(op, f"W_hh{suffix}", tensors["W_hh"], f"({rows}, H)", (gates * H, H))
    if b is not None:
        check.shape(op, f"b{suffix}", b, f"({multiple_of_H(biases)},)", (biases * H,))
    return None if lengths is None else check.lengths(op, "lengths", lengths, x, "x", B, T, "T")


def multiple_of_H(n: int) -> str:
    return "H" if n == 1 else f"{n}H"


def is_zero(p: Any) -> bool:
    return isinstance(p, (float, int)) and p == 0


def draws_nothing(p: Any, training: Any) -> bool:
    """Whether a valid probability of dropping is without effect."""
    return isinstance(p, (float, int)) and (p == 0 or (training is False and 0 <= p <= 1))


def pad(n: int) -> int:
    """The number of elements of a saved row of n."""
    return (n + PAD - 1) // PAD * PAD


def saved_dtypes(x: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The dtype in which the kernels save activations, and the one in which they compute and save
    the state c.
    """
    computing = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.dtype if x.device.type in SAVED_IN_DTYPE_OF_X else computing, computing
