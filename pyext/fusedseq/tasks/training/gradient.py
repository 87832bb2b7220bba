"""The gradient of one step: of one batch, or of several as of the one large batch that they make."""

from contextlib import nullcontext
from typing import NamedTuple

import torch


class Step(NamedTuple):
    """What a task makes of one batch."""

    objective: torch.Tensor  # to be minimised, regularisers included; a scalar
    loss: torch.Tensor  # to be reported, without them; a scalar
    items: int  # how many both are a mean over: the weight of this batch among those of a step
    lr_scale: float = 1.0


class Gradient:
    """Puts the gradient of a step's batches into `.grad`.

    The objectives' mean weighted by items: where an objective is a mean over items, this is the objective of all
    batches in one. (Not so what a batch in one shares, such as a dropout mask.)
    """

    def __init__(self, task, settings):
        self.task, self.settings = task, settings
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.device = next(task.model.parameters()).device

    def __call__(self, batches):
        """batches: a list    returns the Step of all, its losses detached; `.grad` must be none before"""
        if len(batches) == 1:
            result = self.loss(batches[0])
            result.objective.backward()
            return result._replace(objective=result.objective.detach(), loss=result.loss.detach())
        return self._scaled([self._add(batch) for batch in batches])

    def loss(self, batch):
        """The task's Step, in bf16 autocast where the settings say so."""
        bf16 = self.settings.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext():
            return self.task.loss(batch)

    def _add(self, batch):
        """Adds the gradient of a batch's sum; returns its Step of sums."""
        result = self.loss(batch)
        objective = result.objective * result.items
        objective.backward()
        return Step(objective.detach(), result.loss.detach() * result.items, result.items, result.lr_scale)

    def _scaled(self, steps):
        """From sums to means, of the gradients as well."""
        items = max(1, sum(step.items for step in steps))
        torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], float(items))
        return Step(sum(step.objective for step in steps) / items, sum(step.loss for step in steps) / items, items,
                    sum(step.lr_scale for step in steps) / len(steps))  # fmt: skip
