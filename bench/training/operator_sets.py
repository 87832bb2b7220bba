"""Training steps of one task with several operator sets, from the same weights and batches."""

import copy
import dataclasses
import time
from importlib import import_module

import torch
from fusedseq.tasks.catalog import task_module
from fusedseq.tasks.training.gradient import Gradient
from fusedseq.tasks.training.independent_batches import IndependentBatches
from fusedseq.tasks.training.optimization import Optimization

SETS = {
    "fused": "fusedseq.fused",
    "reference": "fusedseq.reference",
    "baselines": "bench.suite.baselines",
    "chunked-loss": "bench.suite.chunked_loss",
    # The whole loss is compiled; `with_operators` says why ptb takes bench.suite.compiled instead.
    "compiled": "bench.suite.baselines",
}
PRECISIONS = ("fp32", "bf16")
# Each set as it is, in the precision of the settings, and in a precision of its own: fused:bf16.
CHOICES = [*SETS, *(f"{name}:{precision}" for name in SETS for precision in PRECISIONS)]
# Batches of sentences differ in length; the shapes of the other tasks are always the same.
TASKS_OF_VARYING_SHAPES = ("en-es", "en-fr")


def prototype(name, settings, data, seed, device):
    """Builds the task `name` on its data, which the runs of all operator sets share."""
    generated = data == "synthetic" or name == "reverse"
    return task_module(name).build(
        settings,
        "synthetic" if generated else data,
        ops=import_module(SETS["fused"]),
        seed=seed,
        device=device,
    )


class Run:
    """A training run of one operator set that is taken step by step beside other runs.

    name: the operator set, with a precision of its own after a colon if it is not the settings'
    task: a prototype, from whose data and weights the run starts
    batches: the run repeats the first so many batches; None: it takes all batches of all epochs
    """

    def __init__(self, name, task, seed, batches=None):
        operators, _, precision = name.partition(":")
        self.name, self.task = name, with_operators(task, operators)
        self.limit, settings = batches, task.settings.training
        if precision:
            settings = dataclasses.replace(settings, precision=precision)
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
        """Takes one training step; returns its loss (a tensor), the number of items, and seconds.

        Every run has its own state of the random number generators, which is set before the step.
        """
        cpu, cuda = self._rng
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.task.device)
        batch = next(self.batches)
        self._synchronize()
        begin = time.perf_counter()
        self.optimization.zero_grad()
        result = self.gradient([batch])
        # The norm is computed only where clipping needs it.
        self.optimization.step(result.lr_scale, with_norm=False)
        self._synchronize()
        seconds = time.perf_counter() - begin
        self._rng = self._get_rng()
        return result.loss, result.items, seconds

    def _synchronize(self):
        if self.task.device.type == "cuda":
            torch.cuda.synchronize()


def with_operators(task, name):
    """Returns a copy of the task whose model uses this operator set and has equal weights.

    torch.compile compiles the loss of a task with independent batches as a whole. The recurrences
    of ptb would unroll, so their operators are compiled one by one.
    """
    independent = isinstance(task, IndependentBatches)
    by_operator = name == "compiled" and not independent
    ops = import_module("bench.suite.compiled" if by_operator else SETS[name])
    description = task.description()
    own = copy.copy(task)
    own.model = task_module(description["task"]).restore(description, ops=ops).to(task.device)
    own.model.load_state_dict(task.model.state_dict())
    own.model.train()
    if name == "compiled" and independent:
        varying = description["task"] in TASKS_OF_VARYING_SHAPES
        own._loss = torch.compile(own._loss, dynamic=varying)
    return own
