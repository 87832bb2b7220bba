"""The recurrent operators that differ in their cell alone: `gru`, `rnn`, `layer_norm_gru`,
`layer_norm_lstm` and `peephole_lstm`. Each of their files has its `Cell`, and calls `compute`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusedseq.fused import autocast, autograd, check, gru_cudnn, int8_weight
from fusedseq.fused.gradient import Gradient
from fusedseq.fused.recurrence import (
    check_sequence,
    draws_nothing,
    is_zero,
    multiple_of_H,
    pad,
    saved_dtypes,
)
from fusedseq.fused.schema import Named
from fusedseq.fused.through_oracle import call_reference
from fusedseq.fused.transforms import is_transformed

WEIGHTS = ("W_ih", "W_hh")
FLAGS = ("reverse", "variational", "training")


@dataclass(frozen=True)
class Cell:
    """What the checks and the results of a recurrent operator depend on.

    op: the operator's name
    gates, biases: the rows of W_ih and W_hh, and the elements of b, for each hidden unit
    saved: the numbers that the forward saves for each hidden unit of a step, beside c
    has_c: whether the state has a part c beside h
    vectors: {parameter vector: its elements for each hidden unit}
    statistics: the numbers that the layer norms save for each row of a step. Operators with layer
        norms take their vectors as one input, `norm`: the vectors joined, in the order here
    """

    op: str
    gates: int
    biases: int
    saved: int
    has_c: bool = False
    vectors: Mapping[str, int] = field(default_factory=dict)
    statistics: int = 0

    @property
    def results(self) -> tuple[str, ...]:
        return ("y", "h", "c") if self.has_c else ("y", "h")

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors that an operator computes with, x first."""
        return ("x", *WEIGHTS, "b", "h0", *(("c0",) if self.has_c else ()), *self.vectors)

    @property
    def probabilities(self) -> tuple[str, ...]:
        return ("zoneout_h", *(("zoneout_c",) if self.has_c else ()), "weight_drop")

    def fake(self, named: Named) -> tuple[Tensor, ...]:
        """The outputs of the registered operator on the meta device."""
        x, h0 = named["x"], named["h0"]
        (T, B, _), H, (activations, computing) = x.shape, h0.size(1), saved_dtypes(x)
        outputs = [x.new_empty(T, B, H), x.new_empty(B, H)]
        if self.has_c:
            outputs.append(x.new_empty(B, H))
        outputs.append(x.new_empty(T, B, self.saved, pad(H), dtype=activations))
        if self.has_c:
            outputs.append(x.new_empty(T, B, pad(H), dtype=computing))
        if self.statistics:
            outputs.append(x.new_empty(T, B, self.statistics, dtype=computing))
        return tuple(outputs)

    def joined(self, named: Named) -> Tensor:
        return torch.cat([named[name] for name in self.vectors])

    def separated(self, norm: Tensor, H: int) -> dict[str, Tensor]:
        """The vectors by name, from what `joined` returns."""
        parts = norm.split([n * H for n in self.vectors.values()])
        return dict(zip(self.vectors, parts, strict=True))


def compute(cell: Cell, given: Named) -> tuple[Tensor, ...]:
    """Checks the arguments of a public function, by name, and computes its operator.

    returns y: (T, B, H), h: (B, H) and, of a cell that has it, c: (B, H)
    """
    count = len(cell.results)
    found = call_if_valid(cell, given)
    if found is not NotImplemented:
        return tuple(found[:count])
    a = operator_inputs(cell, given)
    weights = [a[name] for name in WEIGHTS]
    others = [a[name] for name in cell.tensors if name not in ("x", *WEIGHTS)]
    has_mask = any(a[name] for name in cell.probabilities)
    if int8_weight.has_recurrence(a["x"], weights, others, a["training"] and has_mask):
        return tuple(int8_weight.call(cell.op, a, WEIGHTS))
    a |= dict(zip(WEIGHTS, int8_weight.dequantized(*weights), strict=True))
    if cell.op in gru_cudnn.OPERATORS and gru_cudnn.supports(**a):
        return gru_cudnn.call(cell.op, a)
    return tuple(autograd.call_by_name(cell.op, a)[:count])


def operator_inputs(cell: Cell, given: Named) -> Named:
    """The registered operator's inputs by name, checked, from the arguments of the public function
    by name; what else these hold is kept.
    """
    op, a = cell.op, dict(given)
    tensors = {name: a[name] for name in cell.tensors[1:]}
    a["lengths"] = check_sequence(
        op, a["x"], tensors, a["lengths"], gates=cell.gates, biases=cell.biases
    )
    x, H = a["x"], a["h0"].size(1)
    for name, n in cell.vectors.items():
        check.shape(op, name, a[name], f"({multiple_of_H(n)},)", (n * H,))
    check.starts(op, a["starts"], x)
    for name in cell.probabilities:
        check.probability(op, name, a[name])
    check.flags(op, **{name: a[name] for name in FLAGS})
    if not a["training"]:
        a["weight_drop"] = 0.0
    has_mask = any(a[name] for name in cell.probabilities)
    # Without a mask no seed is needed, and copying one to a GPU would synchronize.
    a["seed"] = check.seed(op, a["seed"], x.device) if has_mask else None
    cast = autocast.cast(x.device.type, *(a[name] for name in cell.tensors))
    a |= dict(zip(cell.tensors, cast, strict=True))
    if cell.statistics:
        a["norm"] = cell.joined(a)
    return a


def call_if_valid(cell: Cell, given: Named) -> Any:
    """`int8_weight.call_if_valid` of a call that draws no masks, and NotImplemented for others.

    given: the arguments of the public function by name
    """
    has_zoneout = not all(is_zero(given[name]) for name in cell.probabilities[:-1])
    if has_zoneout or not draws_nothing(given["weight_drop"], given["training"]):
        return NotImplemented
    inputs = given | {"weight_drop": 0.0, "seed": None}
    if cell.statistics:
        if not can_be_joined(cell, given):
            return NotImplemented
        inputs["norm"] = cell.joined(given)
    return int8_weight.call_by_name_if_valid(cell.op, inputs)


def can_be_joined(cell: Cell, given: Named) -> bool:
    """Whether C++ can check a call whose vectors are joined: C++ sees what they make up alone."""
    x, h0, vectors = given["x"], given["h0"], [given[name] for name in cell.vectors]
    if is_transformed() or not all(isinstance(t, Tensor) for t in (x, h0, *vectors)):
        return False
    device = x.device.type
    if device not in autograd.CHECKED_IN_CPP or not autograd.recorder or autocast.is_on(device):
        return False
    kind, H = (x.dtype, x.device), h0.shape[-1] if h0.dim() else 0
    return all(
        t.shape == (n * H,) and (t.dtype, t.device) == kind
        for t, n in zip(vectors, cell.vectors.values(), strict=True)
    )


def register(cell: Cell, reference: Callable[..., Any]) -> None:
    """Registers the shapes of an operator's results, and its gradients.

    reference: the function of `fusedseq.reference` that is the operator's oracle
    """

    def oracle(named: Named) -> Any:
        if cell.statistics:
            named = named | cell.separated(named["norm"], named["h0"].size(1))
        return call_reference(reference, named)

    gradient = Gradient(
        results=cell.results, backwards=(f"{cell.op}_backward",), oracle=oracle, loops=True
    )
    autograd.register(cell.op, cell.fake, gradient)
    autograd.register_fake_backward(cell.op)
