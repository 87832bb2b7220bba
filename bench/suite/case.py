"""The definition of a benchmark case: one call of an operator, and what it is compared with."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from fusedseq import fused, testing

from bench.suite import baselines, compiled, optimizers

CASE_FIELDS = ("dtype", "full", "roofline", "whole")


@dataclass(frozen=True)
class Target:
    """A speed or a memory use that the fused operator has to reach.

    against: the name of a provider (eager, torch, ...): `fused` must be at least `value` times as
        fast as it; "roof": `fused` must reach at least this fraction of the case's roofline limit;
        "memory of PROVIDER": `fused` must need at most this fraction of the provider's peak memory
    """

    against: str
    value: float


@dataclass(frozen=True)
class BenchmarkCase:
    """A call that is timed with or without its backward.

    op, id: the operator, and what distinguishes the case from the operator's other cases
    make: randn -> (args, kwargs), as in fusedseq.testing.Case
    call: (ops, *args, **kwargs) -> results; by default ops.<op>
    parts: (args, kwargs) -> [(op, args, kwargs)] to compare with the oracle; by default the call
        itself
    flops: floating point operations of the forward; the backward needs twice as many
    traffic: the least number of elements read and written over everything that is timed
    copied: shape of the tensor whose copy (or product with a vector) is the roofline limit for
        `traffic`
    roofline: "gemm": flops against the machine's GEMM rate; "copy" or "mv": traffic against torch's
        copy_ or mv
    eager: the eager baseline, where it is not the function in bench.suite.baselines
    others: more providers; "torch" is torch's own operator, where `eager` does not call it already
    slow: more providers, in the full set only
    whole: in the full set, also compile the loop over the steps as a whole
    full: the case belongs to the full set only
    """

    op: str
    id: str
    make: Callable
    call: Callable | None = None
    parts: Callable | None = None
    backward: bool = True
    dtype: torch.dtype = torch.float32
    flops: float = 0.0
    traffic: float = 0.0
    copied: tuple = ()
    roofline: str = "gemm"
    targets: tuple = ()
    eager: Callable | None = None
    others: dict = field(default_factory=dict)
    slow: dict = field(default_factory=dict)
    whole: bool = False
    full: bool = False

    @property
    def mode(self):
        return "forward+backward" if self.backward else "forward"

    @property
    def name(self):
        dtype = "" if self.dtype == torch.float32 else str(self.dtype)[6:]
        words = [self.op, self.id, "" if self.backward else "forward", dtype]
        return "-".join(filter(None, words))

    def in_dtype(self, dtype):
        """Returns the case in another dtype, without targets: these are set for its own alone."""
        return self if dtype == self.dtype else replace(self, dtype=dtype, targets=())

    def inputs(self, device):
        return testing.Case(self.op, self.id, self.make).inputs(device, self.dtype)

    def run(self, ops):
        """Returns the case's call with the functions of `ops`."""
        if self.call is None:
            return getattr(ops, self.op)
        return lambda *args, **kwargs: self.call(ops, *args, **kwargs)

    def providers(self, full):
        """Returns {name: function} of `fused` and everything that it is compared with."""
        eager = self.eager or self.run(baselines)
        slow = self.slow if full else {}
        found = {"fused": self.run(fused), "eager": eager, **self.others, **slow}
        found["compiled"] = self.run(compiled)
        if self.whole and full:
            found["compiled whole"] = compiled.compile_whole(eager)
        return found


class OptimizerStepCase(BenchmarkCase):
    """A step of an optimizer, which is no operator: bench.suite.optimizers has its providers."""

    mode = "step"

    @property
    def name(self):
        return f"{self.op}-{self.id}"

    def providers(self, full):
        loop, foreach = (
            partial(optimizers.torch_asgd, foreach=foreach) for foreach in (False, True)
        )
        named = {"fused": optimizers.nt_asgd, "eager": loop, "torch": foreach}
        return {name: optimizers.stateful_step(build) for name, build in named.items()}


def split_options(options):
    """Splits keyword arguments into (fields of the case, options of the operator)."""
    fields = {name: options.pop(name) for name in CASE_FIELDS if name in options}
    return fields, options
