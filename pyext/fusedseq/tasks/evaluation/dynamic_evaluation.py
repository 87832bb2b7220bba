"""Dynamic evaluation (Krause et al., 2018): a language model keeps training on the evaluated text.

Each segment is evaluated first and trained on afterwards, so that no prediction uses weights that
were trained on its target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedseq.tasks.ptb import Task, detached, metrics


@dataclass(frozen=True)
class DynamicEvaluation:
    """How weights w, initially the trained weights w_g, change after a segment with gradient g:

        w <- w - lr g + decay (w_g - w)                                        plain SGD
        w <- w - lr g / (sqrt(MS) + epsilon) + decay R (w_g - w)               with `rms`

    MS is the mean of g^2 over the training text; R = sqrt(MS) / mean(sqrt(MS)), at most 1 / decay.
    g is the gradient of the mean cross-entropy of the segment, without dropout and regularization.
    lr 0 is the static evaluation.
    """

    lr: float
    decay: float = 0.0
    # Steps in a segment; the default is the paper's for words.
    segment: int = 5
    # Columns that the text is read in, side by side; each update uses all of them.
    columns: int = 1
    rms: bool = False
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        leasts = {"lr": 0, "decay": 0, "segment": 1, "columns": 1, "epsilon": 0}
        for name, least in leasts.items():
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(
                    f"dynamic evaluation: {name} must be at least {least}, got {value}"
                )
            if not math.isfinite(value):
                raise ValueError(f"dynamic evaluation: {name} must be finite, got {value}")


def evaluate(
    task: Task, split: str, settings: DynamicEvaluation, temperature: float = 1.0
) -> dict[str, Any]:
    """The metrics of a split, as `task.evaluate` returns them; the weights are restored at the end.

    task: its model must be in eval mode
    temperature: of the softmax, in evaluation and in training
    """
    model = task.model
    weights = list(model.parameters())
    trained = [w.detach().clone() for w in weights]
    scales = _scales(task, settings, temperature) if settings.rms else None
    total, items, state = torch.zeros((), dtype=torch.float64, device=task.device), 0, None
    try:
        for batch in task.batches(split, settings.columns, settings.segment):
            loss, gradients, state = _evaluated(model, batch, state, temperature)
            total += loss.detach()
            items += batch.items
            _update(weights, trained, gradients, scales, settings, batch.items)
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, trained)
    return metrics(total.item() / items, items)


def _evaluated(
    model: Any, batch: Any, state: tuple | None, temperature: float
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple]:
    """The summed loss of a segment, its gradients, and the state for the next segment."""
    with torch.enable_grad():
        y, _, state = model(batch.inputs, state)
        loss = model.cross_entropy(y, batch.targets, "sum", temperature)
        return loss, torch.autograd.grad(loss, list(model.parameters())), detached(state)


@torch.no_grad()
def _update(
    weights: Sequence[torch.Tensor],
    trained: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    scales: tuple | None,
    settings: DynamicEvaluation,
    items: int,
) -> None:
    """Applies the formula of DynamicEvaluation to `weights`; gradients: of the summed loss."""
    steps = torch._foreach_mul(gradients, -settings.lr / max(items, 1))
    back = torch._foreach_sub(trained, weights)
    if scales is None:
        torch._foreach_mul_(back, settings.decay)
    else:
        rms, decays = scales
        torch._foreach_div_(steps, rms)
        torch._foreach_mul_(back, decays)
    torch._foreach_add_(weights, steps)
    torch._foreach_add_(weights, back)


def _scales(
    task: Task, settings: DynamicEvaluation, temperature: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """sqrt(MS) + epsilon and decay R of each weight, from one pass over the training text."""
    squares, count, state = [torch.zeros_like(w) for w in task.model.parameters()], 0, None
    for batch in task.batches("train", task.settings.data.batch, settings.segment):
        _, gradients, state = _evaluated(task.model, batch, state, temperature)
        scaled = torch._foreach_div(gradients, max(batch.items, 1))
        torch._foreach_addcmul_(squares, scaled, scaled)
        count += 1
    rms = [(s / count).sqrt() for s in squares]
    mean = sum(r.double().sum() for r in rms) / sum(r.numel() for r in rms)
    decays = [(settings.decay * r / mean.to(r.dtype)).clamp(max=1.0) for r in rms]
    return [r + settings.epsilon for r in rms], decays
