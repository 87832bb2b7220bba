"""The gradient of one step: of one batch, or of several as of the one large batch that they make."""

import inspect
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

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
    batches in one. (Not so what a batch in one shares, such as a dropout mask.)

    Several processes each take a part of every batch, where the task can `split` one; else the batches of a step are
    dealt out: training.accumulate, how many there are, is then a multiple of the processes, and a run by one
    process with the same settings has the same result, up to the order of the sums (and to dropout's masks).
    """

    def __init__(self, task, settings, processes):
        self.task, self.settings, self.processes = task, settings, processes
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.device = next(task.model.parameters()).device
        self.splits = hasattr(task, "split")
        self.shared = None  # DDP's module around the loss
        if not self.splits and settings.accumulate % processes.count:
            raise ValueError(f"training.accumulate must be a multiple of the processes = {processes.count}, among which "
                             f"the batches of a step are dealt out, got {settings.accumulate}")  # fmt: skip

    def share(self):
        """Begins to share gradients with the other processes; every process calls it, with the weights loaded."""
        if self.processes.count > 1:
            self.shared = DistributedDataParallel(_Loss(self.task.model, self.loss), **{SYNC_BUFFERS: False})

    def unshare(self):
        """Before the processes part: what DDP holds of their group ends a process badly."""
        self.shared = None

    def __call__(self, batches):
        """batches: a list    returns the Step of all, its losses detached; `.grad` must be none before"""
        if self.processes.count == 1 and len(batches) == 1:
            result = self.loss(batches[0])
            result.objective.backward()
            return result._replace(objective=result.objective.detach(), loss=result.loss.detach())
        own = self._own(batches)
        return self._scaled([self._add(batch, counts, last=batch is own[-1][0]) for batch, counts in own])

    def loss(self, batch):
        """The task's Step, in bf16 autocast where the settings say so."""
        bf16 = self.settings.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext():
            return self.task.loss(batch)

    def _own(self, batches):
        """This process's part of the batches, each with whether it counts: where an epoch's last step has too few, a
        process does one for nothing, for the others wait for its gradient."""
        rank, count = self.processes.rank, self.processes.count
        if count > 1 and self.splits:
            return [(self.task.split(batch, rank, count), True) for batch in batches]
        return [(batch, True) for batch in batches[rank::count]] or [(batches[0], False)]

    def _add(self, batch, counts, last):
        """Adds the gradient of a batch's sum; returns its Step of sums. The last one's backward shares gradients."""
        with nullcontext() if last or self.shared is None else self.shared.no_sync():
            result = self.loss(batch) if self.shared is None else self.shared(batch)
            items = result.items if counts else 0
            objective = result.objective * items
            objective.backward()
        return Step(objective.detach(), result.loss.detach() * items, items, result.lr_scale if counts else 0.0)

    def _scaled(self, steps):
        """From sums to means, of the gradients as well, over all processes."""
        counted = sum(step.items > 0 for step in steps)
        host = [sum(step.items for step in steps), sum(step.lr_scale for step in steps), counted]
        total, scale, counted = self.processes.sum(host)
        items = max(1, int(total))
        divisor = items / self.processes.count  # DDP has divided by the count
        torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], divisor)
        sums = torch.stack((sum(step.objective for step in steps), sum(step.loss for step in steps)))
        objective, loss = self.processes.sum_tensor(sums) / items
        return Step(objective, loss, items, scale / max(1, counted))


class _Loss(torch.nn.Module):
    """The loss of a batch as a module's forward, which is where DDP looks."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch):
        return self.loss(batch)
