"""The gradient of one step: of one batch, or of several as of the one large batch that they make."""

import inspect
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedseq.tasks.training.processes import Processes

# Ours are constants. torch 2.13 has a new name for the option.
SYNC_BUFFERS = next(name for name in ("forward_sync_buffers", "broadcast_buffers")
                    if name in inspect.signature(DistributedDataParallel).parameters)  # fmt: skip


class Step(NamedTuple):
    """What a task makes of one batch."""

    objective: torch.Tensor  # to be minimised, regularisers included; a scalar
    loss: torch.Tensor  # to be reported, without them; a scalar
    items: int  # how many both are a mean over: the weight of this batch among those of a step
    lr_scale: float = 1.0


class Gradient:
    """Puts the gradient of a step's batches into `.grad`, the same in all processes.

    The objectives' mean weighted by items: where an objective is a mean over items, this is the objective of all
    batches in one. (Not so what a batch in one shares, such as a dropout mask.) Each of several processes has its part
    of every batch, perhaps of 0 items: the result is that of one process with all, up to the order of the sums.
    """

    def __init__(self, task, settings, processes=None):
        self.task, self.settings, self.processes = task, settings, processes or Processes()
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.device = next(task.model.parameters()).device
        self.shared = None  # DDP's module around the loss

    @contextmanager
    def sharing(self):
        """Within it gradients are shared with the other processes; every process enters it, with the weights loaded."""
        if self.processes.count > 1:
            self.shared = DistributedDataParallel(_Loss(self.task.model, self.loss), **{SYNC_BUFFERS: False})
        try:
            yield
        finally:
            self.shared = None

    def __call__(self, batches):
        """batches: a list    returns the Step of all, its losses detached; `.grad` must be none before"""
        if self.processes.count == 1 and len(batches) == 1:
            result = self.loss(batches[0])
            result.objective.backward()
            return result._replace(objective=result.objective.detach(), loss=result.loss.detach())
        return self._scaled([*[self._add(batch, share=False) for batch in batches[:-1]], self._add(batches[-1])])

    def loss(self, batch):
        """The task's Step, in bf16 autocast where the settings say so."""
        bf16 = self.settings.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext():
            return self.task.loss(batch)

    def _add(self, batch, share=True):
        """Adds the gradient of a batch's sum; returns its Step of sums. One backward of a step shares all gradients."""
        loss = self.shared or self.loss
        with nullcontext() if share or self.shared is None else self.shared.no_sync():
            result = loss(batch)
            objective = result.objective * result.items
            objective.backward()
        return result._replace(objective=objective.detach(), loss=result.loss.detach() * result.items)

    def _scaled(self, steps):
        """From sums to means over all processes, of the gradients as well."""
        items = max(1, int(self.processes.sum(sum(step.items for step in steps))))
        divisor = items / self.processes.count  # DDP has divided by the count
        torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], divisor)
        sums = torch.stack((sum(step.objective for step in steps), sum(step.loss for step in steps)))
        objective, loss = self.processes.sum_tensor(sums) / items
        return Step(objective, loss, items, sum(step.lr_scale for step in steps) / len(steps))


class _Loss(torch.nn.Module):
    """The loss of a batch as a module's forward, which is where DDP looks."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch):
        return self.loss(batch)
