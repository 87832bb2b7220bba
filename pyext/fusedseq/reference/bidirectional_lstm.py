from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedseq.reference.lstm import lstm

State = tuple[Tensor, Tensor]  # h and c, (B, H) each


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
    """The two directions of a layer of a bidirectional LSTM (Schuster & Paliwal, 1997): one `lstm`
    that reads each sequence from its start, and one, with parameters of its own, that reads it
    from its end.

    x: (T, B, X)
    W_ih, W_ih_reverse: (4H, X)
    W_hh, W_hh_reverse: (4H, H)
    b, b_reverse: (4H,) or None
    h0, c0, h0_reverse, c0_reverse: (B, H)
    lengths, weight_drop, variational, training: of both directions, as in `lstm`
    starts, starts_reverse: (T, B) bool, as in `lstm`: the first steps of the sequences in a packed
        row, and for the reverse direction their last ones
    seed, seed_reverse: of the weight drop of each direction, as in `dropout_mask`
    returns y: (T, B, 2H), the output of the forward direction first, and (h, c), (B, H) each, of
        the forward direction and of the reverse one
    """
    options: dict[str, Any] = {"weight_drop": weight_drop, "variational": variational}
    options |= {"lengths": lengths, "training": training}
    y, state = lstm(x, W_ih, W_hh, b, h0, c0, starts=starts, seed=seed, **options)
    reverse = W_ih_reverse, W_hh_reverse, b_reverse, h0_reverse, c0_reverse
    options |= {"starts": starts_reverse, "seed": seed_reverse, "reverse": True}
    y_reverse, state_reverse = lstm(x, *reverse, **options)
    return torch.cat([y, y_reverse], -1), (state, state_reverse)
