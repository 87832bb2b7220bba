from collections.abc import Sequence

from torch import Tensor

from fusedseq import reference
from fusedseq.fused import check
from fusedseq.fused.recurrent_cell import Cell, compute, register
from fusedseq.fused.schema import Named

CELL = Cell(
    "layer_norm_lstm",
    gates=4,
    biases=4,
    saved=8,
    has_c=True,
    vectors={"gamma_ih": 4, "gamma_hh": 4, "gamma_c": 1, "beta_c": 1},
    statistics=4,
)


def layer_norm_lstm(
    x: Tensor,
    W_ih: Tensor,
    W_hh: Tensor,
    b: Tensor | None,
    gamma_ih: Tensor,
    gamma_hh: Tensor,
    gamma_c: Tensor,
    beta_c: Tensor,
    h0: Tensor,
    c0: Tensor,
    lengths: Tensor | Sequence[int] | None = None,
    *,
    eps: float = 1e-5,
    starts: Tensor | None = None,
    reverse: bool = False,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    weight_drop: float = 0.0,
    variational: bool = False,
    training: bool = True,
    seed: int | Tensor = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes `fusedseq.reference.layer_norm_lstm` with one kernel call for the whole sequence, as
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
        "gamma_c": gamma_c,
        "beta_c": beta_c,
        "h0": h0,
        "c0": c0,
        "lengths": lengths,
        "eps": eps,
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


register(CELL, reference.layer_norm_lstm)
