"""Dynamic evaluation (Krause et al., 2018): a language model goes on learning from the text that it is judged by.

Each segment is judged first and learnt from afterwards, so that nothing is predicted by weights that have seen it.
"""

from dataclasses import dataclass

import torch

from fusedseq.tasks.ptb import detached, figures


@dataclass(frozen=True)
class DynamicEvaluation:
    """How weights w follow a text, from the trained ones, w_g: after each segment, of gradient g,

        w <- w - lr g + decay (w_g - w)                                        plain SGD
        w <- w - lr g / (sqrt(MS) + epsilon) + decay R (w_g - w)               with `rms`

    MS is the mean of g^2 over the training text, R = sqrt(MS) / mean(sqrt(MS)), no more than 1 / decay. g is of the mean
    cross-entropy of the segment, without dropout and regularization. lr 0 is the static evaluation.
    """

    lr: float
    decay: float = 0.0
    segment: int = 5  # steps; the paper's for words
    batch: int = 1  # columns that the text is read in, side by side, all of which are learnt from at once
    rms: bool = False
    epsilon: float = 1e-3

    def __post_init__(self):
        for name, least in (("lr", 0), ("decay", 0), ("segment", 1), ("batch", 1), ("epsilon", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"dynamic evaluation: {name} must be at least {least}, got {getattr(self, name)}")


def evaluate(task, split, settings, temperature=1.0):
    """The figures of a split, as `task.evaluate` has them; the model, in eval mode, is afterwards what it was.

    task: a ptb.Task    settings: a DynamicEvaluation    temperature: of the softmax, in judging and in learning
    """
    model = task.model
    weights = list(model.parameters())
    trained = [w.detach().clone() for w in weights]
    scales = _scales(task, settings, temperature) if settings.rms else None
    total, items, state = torch.zeros((), dtype=torch.float64, device=task.device), 0, None
    try:
        for batch in task.batches(split, settings.batch, settings.segment):
            loss, gradients, state = _judged(model, batch, state, temperature)
            total += loss.detach()
            items += batch.items
            _learn(weights, trained, gradients, scales, settings, batch.items)
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, trained)
    return figures(total.item() / items, items)


def _judged(model, batch, state, temperature):
    """The sum of a segment's losses, its gradients, and the state that is carried on."""
    with torch.enable_grad():
        y, _, state = model(batch.inputs, state)
        loss = model.cross_entropy(y, batch.targets, "sum", temperature)
        return loss, torch.autograd.grad(loss, list(model.parameters())), detached(state)


@torch.no_grad()
def _learn(weights, trained, gradients, scales, settings, items):
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


def _scales(task, settings, temperature):
    """sqrt(MS) + epsilon and decay R, of each weight, from one pass over the training text."""
    squares, count, state = [torch.zeros_like(w) for w in task.model.parameters()], 0, None
    for batch in task.batches("train", task.settings.data.batch, settings.segment):
        _, gradients, state = _judged(task.model, batch, state, temperature)
        scaled = torch._foreach_div(gradients, max(batch.items, 1))
        torch._foreach_addcmul_(squares, scaled, scaled)
        count += 1
    rms = [(s / count).sqrt() for s in squares]
    mean = sum(r.double().sum() for r in rms) / sum(r.numel() for r in rms)
    decays = [(settings.decay * r / mean.to(r.dtype)).clamp(max=1.0) for r in rms]
    return [r + settings.epsilon for r in rms], decays
