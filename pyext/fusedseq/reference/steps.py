"""The loop over the time steps that all recurrent operators have in common."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedseq.reference.dropout_mask import stream_mask

State = tuple[Tensor, ...]  # of the recurrence, (B, H) each; the first tensor is the output


def over_steps(
    step: Callable[[int, Tensor, State], State],
    x: Tensor,
    state: State,
    lengths: Tensor | Sequence[int] | None,
    starts: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, State]:
    """Computes a recurrence over all steps of x.

    step: (n, x_n, the state before it) -> the state after it, for the n-th step that is computed;
        x_n is (B, X)
    x: (T, B, X)    state: the initial one    lengths, starts, reverse: as in `lstm`
    returns y: (T, B, H), the last state
    """
    alive = mask_of_steps(lengths, x)
    if alive is not None:
        x = torch.where(alive, x, 0.0)  # a product with 0 would keep NaN, as would its gradient
    if reverse:
        x = flip_sequences(x, lengths)
        starts = None if starts is None else flip_sequences(starts, lengths)
    y = []
    for n, x_n in enumerate(x):
        before = state
        if starts is not None:
            before = tuple(s.masked_fill(starts[n][:, None], 0.0) for s in state)
        after = step(n, x_n, before)
        if alive is None:
            state = after
            y.append(after[0])
        else:
            pairs = zip(after, state, strict=True)
            state = tuple(torch.where(alive[n], new, old) for new, old in pairs)
            y.append(torch.where(alive[n], after[0], 0.0))
    outputs = torch.stack(y)
    return flip_sequences(outputs, lengths) if reverse else outputs, state


def zoneout(
    stream: int, p: float, seed: int | Tensor, training: bool, shape: torch.Size, x: Tensor
) -> Callable[[int, Tensor, Tensor], Tensor]:
    """Zoneout of one tensor of the state (Krueger et al., 2017).

    stream: of the mask, which counts the steps in the order in which they are computed
    p: the probability that a unit keeps its value at a step
    shape: (B, H) of the state    x: (T, B, X)
    returns mix(n, after, before): what a step carries on from the values after and before the n-th
        step that is computed, (B, H) each; without `training` its expectation
    """
    update = stream_mask(stream, seed, p, (len(x), *shape), x.device) if training and p else None

    def mix(n: int, after: Tensor, before: Tensor) -> Tensor:
        if update is not None:
            return torch.where(update[n], after, before)
        return p * before + (1 - p) * after if p else after

    return mix


def mask_of_steps(lengths: Tensor | Sequence[int] | None, x: Tensor) -> Tensor | None:
    """Returns whether each step is within its sequence's length, (T, B, 1), or None for None."""
    if lengths is None:
        return None
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=x.device)
    return (torch.arange(len(x), device=x.device)[:, None] < lengths)[:, :, None]


def flip_sequences(x: Tensor, lengths: Tensor | Sequence[int] | None) -> Tensor:
    """Reverses the steps of each sequence. Steps past its length stay where they are.

    x: (T, B, ...)    lengths: (B,) or None
    """
    if lengths is None:
        return x.flip(0)
    t = torch.arange(len(x), device=x.device)[:, None]
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=x.device)
    index = torch.where(t < lengths, lengths - 1 - t, t)  # (T, B)
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2))
    return x.gather(0, index.expand_as(x))
