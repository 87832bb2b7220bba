from collections.abc import Sequence

from torch import Tensor

from fusedseq import reference
from fusedseq.fused import hidden_state

OP = "layer_norm_gru"


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
    given = locals()
    if not eps >= 0:
        raise ValueError(f"{OP}: eps must be at least 0, got {eps}")
    return hidden_state.call(OP, given)


hidden_state.register(OP, reference.layer_norm_gru)
