from collections.abc import Sequence

from torch import Tensor

from fusedseq import reference
from fusedseq.fused import check
from fusedseq.fused.recurrent_cell import Cell, compute, register
from fusedseq.fused.schema import Named

CELL = Cell(
    "layer_norm_gru",
    gates=3,
    biases=4,
    saved=6,
    vectors={"gamma_ih": 3, "gamma_hh": 3},
    statistics=2,
)


def layer_norm_gru(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    gamma_ih: Tensor,
    gamma_hh: Tensor,
    h0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    eps: float = 1e-5,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_h: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """Computes `fusedseq.reference.layer_norm_gru` with one kernel call for the whole sequence, as
    `lstm`.

    On CUDA a loop over the steps computes it.

    Errors: those of `lstm`, and ValueError for an eps below 0.
    """
    check.at_least_zero(CELL.op, "eps", eps)
    given: Named = {
        "x": x,
        "W_ih": W_ih,
        "W_hh": W_hh,
        "b": b,
        "gamma_ih": gamma_ih,
        "gamma_hh": gamma_hh,
        "h0": h0,
        "lengths": lengths,
        "eps": eps,
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


register(CELL, reference.layer_norm_gru)
