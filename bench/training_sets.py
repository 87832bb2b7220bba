"""Operator sets side by side: the training steps of one task by each, from the same weights on the same batches."""

import copy
import time
from importlib import import_module

import torch
from fusedseq.tasks.catalog import task_module
from fusedseq.tasks.independent import IndependentBatches
from fusedseq.tasks.training.gradient import Gradient
from fusedseq.tasks.training.optimization import Optimization

SETS = {
    "fused": "fusedseq.fused",
    "reference": "fusedseq.reference",
    "baselines": "bench.baselines",
    "compiled": "bench.baselines",  # of ptb, whose recurrences unroll, bench.compiled: operator by operator
}


def prototype(name, settings, data, seed, device):
    """The task `name` on its data, which the runs of all operator sets share."""
    generated = data == "synthetic" or name == "reverse"
    return task_module(name).build(settings, "synthetic" if generated else data, ops=import_module(SETS["fused"]),
                                   seed=seed, device=device)  # fmt: skip


class Run:
    """A training run with random numbers of its own, taken a step at a time beside others.

    name: the operator set    task: a prototype, whose data and weights the run begins with    batches: the first so many,
    again and again; None: of all epochs
    """

    def __init__(self, name, task, seed, batches=None):
        self.name, self.task = name, with_operators(task, name)
        self.limit, settings = batches, task.settings.training
        self.optimization = Optimization(self.task.model.parameters(), settings)
        self.gradient = Gradient(self.task, settings)
        self.batches = self._batches()
        torch.manual_seed(seed)
        self._rng = self._get_rng()

    def _batches(self):
        epoch = 0
        while True:
            batches = self.task.start_epoch(epoch)
            yield from (batches[i] for i in range(len(batches))[: self.limit])
            epoch += 1 if self.limit is None else 0

    def _get_rng(self):
        cuda = self.task.device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.task.device) if cuda else None

    def step(self):
        """One training step: its loss (a tensor), items and seconds."""
        cpu, cuda = self._rng
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.task.device)
        batch = next(self.batches)
        self._wait()
        begun = time.perf_counter()
        self.optimization.zero_grad()
        result = self.gradient([batch])
        self.optimization.step(result.lr_scale, with_norm=False)  # unless it is needed to clip
        self._wait()
        seconds = time.perf_counter() - begun
        self._rng = self._get_rng()
        return result.loss, result.items, seconds

    def _wait(self):
        if self.task.device.type == "cuda":
            torch.cuda.synchronize()


def with_operators(task, name):
    """The task with a model of its own, of this operator set, that has the same weights."""
    independent = isinstance(task, IndependentBatches)
    by_operator = name == "compiled" and not independent
    ops = import_module("bench.compiled" if by_operator else SETS[name])
    description = task.description()
    own = copy.copy(task)
    own.model = task_module(description["task"]).restore(description, ops=ops).to(task.device)
    own.model.load_state_dict(task.model.state_dict())
    own.model.train()
    if name == "compiled" and independent:
        # Sentences have many lengths; the shapes of words and reverse are always the same.
        own._loss = torch.compile(own._loss, dynamic=description["task"] in ("en-es", "en-fr"))
    return own
