from collections.abc import Sequence

from torch import Tensor

from fusedseq import reference
from fusedseq.fused.recurrent_cell import Cell, compute, register
from fusedseq.fused.schema import Named

CELL = Cell("peephole_lstm", gates=4, biases=4, saved=4, has_c=True, vectors={"peephole": 3})


def peephole_lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    peephole: Tensor,
    h0: Tensor,
    c0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes `fusedseq.reference.peephole_lstm` with one kernel call for the whole sequence, as
    `lstm`.

    On CUDA a persistent kernel computes it where the weights fit, elsewhere a loop over the steps.

    Errors: those of `lstm`.
    """
    given: Named = {
        "x": x,
        "W_ih": W_ih,
        "W_hh": W_hh,
        "b": b,
        "peephole": peephole,
        "h0": h0,
        "c0": c0,
        "lengths": lengths,
        "starts": starts,
        "reverse": reverse,
        "zoneout_h": zoneout_h,
        "zoneout_c": zoneout_c,
        "weight_drop": weight_drop,
        "variational": variational,
        "training": training,
        "seed": seed,
    }
    y, h, c = compute(CELL, given)
    return y, (h, c)


register(CELL, reference.peephole_lstm)
