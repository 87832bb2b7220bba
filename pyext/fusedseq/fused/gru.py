from collections.abc import Sequence

from torch import Tensor

from fusedseq import reference
from fusedseq.fused.recurrent_cell import Cell, compute, register
from fusedseq.fused.schema import Named

CELL = Cell("gru", gates=3, biases=4, saved=4)


def gru(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    h0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_h: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """Computes `fusedseq.reference.gru` with one kernel call for the whole sequence, as `lstm`.

    On CUDA, calls in fp32, bf16 and fp16 without `starts`, zoneout and weight drop are computed by
    cuDNN, unless torch uses deterministic algorithms only; all others, and those that torch.compile
    or torch.func traces, by a persistent kernel where the weights fit, elsewhere by a loop over the
    steps.

    Errors: those of `lstm`.
    """
    given: Named = {
        "x": x,
        "W_ih": W_ih,
        "W_hh": W_hh,
        "b": b,
        "h0": h0,
        "lengths": lengths,
        "starts": starts,
        "reverse": reverse,
        "zoneout_h": zoneout_h,
        "weight_drop": weight_drop,
        "variational": variational,
        "training": training,
        "seed": seed,
    }
    y, h = compute(CELL, given)
    return y, h


register(CELL, reference.gru)
