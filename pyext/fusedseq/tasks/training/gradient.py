"""The gradient of one training step, which consists of one batch or of several accumulated ones."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedseq.tasks.training.optimization import TrainingSettings
from fusedseq.tasks.training.processes import Processes
from fusedseq.tasks.training.task import Step, Task

# DDP's option to synchronize buffers, which torch 2.13 renamed. It is switched off: the buffers of
# these models are constants.
SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class Gradient:
    """Computes the gradient of a step's batches into `.grad`, identical in all processes.

    The objective of a step is the mean of its batches' objectives, weighted by their items. Where
    an objective is a mean over items, this equals the objective of all batches concatenated (except
    for what the items of one batch share, such as a dropout mask). With several processes each has
    its part of every batch, possibly of 0 items; the result is that of one process with all items,
    up to the order of summation.
    """

    def __init__(
        self, task: Task, settings: TrainingSettings, processes: Processes | None = None
    ) -> None:
        self.task, self.settings, self.processes = task, settings, processes or Processes()
        self.parameters = [p for p in task.model.parameters() if p.requires_grad]
        self.device = next(task.model.parameters()).device
        self.shared: DistributedDataParallel | None = None  # wraps the loss inside `sharing`

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Shares gradients with the other processes inside the block.

        Every process enters the block after its weights have been loaded.
        """
        if self.processes.count > 1:
            self.shared = DistributedDataParallel(
                _Loss(self.task.model, self.loss), **{SYNC_BUFFERS: False}
            )
        try:
            yield
        finally:
            self.shared = None

    def __call__(self, batches: Sequence[Any]) -> Step:
        """Runs forward and backward for all batches of a step; every `.grad` must be None before.

        Returns the Step of all batches together, with detached tensors.
        """
        if self.processes.count == 1 and len(batches) == 1:
            result = self.loss(batches[0])
            result.objective.backward()
            return result._replace(objective=result.objective.detach(), loss=result.loss.detach())
        steps = [self._add(batch, share=False) for batch in batches[:-1]]
        return self._scaled([*steps, self._add(batches[-1])])

    def loss(self, batch: Any) -> Step:
        """The task's Step of a batch, under bf16 autocast where training.precision is bf16."""
        bf16 = self.settings.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext():
            return self.task.loss(batch)

    def _add(self, batch: Any, share: bool = True) -> Step:
        """Adds the gradient of a batch's summed objective to `.grad`; returns its Step as sums.

        share: whether DDP reduces the gradients in this backward pass. Only the last pass of a step
        does, which then reduces the accumulated gradients.
        """
        loss = self.shared or self.loss
        with nullcontext() if share or self.shared is None else self.shared.no_sync():
            result = loss(batch)
            objective = result.objective * result.items
            objective.backward()
        return result._replace(
            objective=objective.detach(), loss=result.loss.detach() * result.items
        )

    def _scaled(self, steps: list[Step]) -> Step:
        """Divides the summed objective, loss and gradients by the items of all processes."""
        items = max(1, int(self.processes.sum(sum(step.items for step in steps))))
        divisor = items / self.processes.count  # DDP has already divided by the process count
        torch._foreach_div_([p.grad for p in self.parameters if p.grad is not None], divisor)
        sums = torch.stack(
            (sum(step.objective for step in steps), sum(step.loss for step in steps))
        )
        objective, loss = self.processes.sum_tensor(sums) / items
        return Step(objective, loss, items, sum(step.lr_scale for step in steps) / len(steps))


class _Loss(torch.nn.Module):
    """The loss of a batch as the forward of a module, because DDP only wraps modules."""

    def __init__(self, model: torch.nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Step:
        return self.loss(batch)
