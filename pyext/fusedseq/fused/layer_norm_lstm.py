from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedseq import reference
from fusedseq.fused import check, lstm_with_vectors
from fusedseq.fused.lstm import fake as fake_lstm
from fusedseq.fused.lstm import pad, saved_dtypes
from fusedseq.fused.schema import Named
from fusedseq.fused.through_oracle import call_reference

OP = "layer_norm_lstm"
VECTORS = lstm_with_vectors.VECTORS[OP]  # in the order in which the kernel takes them as `norm`


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
    check.at_least_zero(OP, "eps", eps)
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
    return lstm_with_vectors.call(OP, given)


def fake(named: Named) -> tuple[Tensor, ...]:
    x, (T, B, _), H = named["x"], named["x"].shape, named["h0"].size(1)
    y, h, c, _, cells = fake_lstm(named)
    activations, computing = saved_dtypes(x)
    gates = x.new_empty(T, B, 8, pad(H), dtype=activations)
    return y, h, c, gates, cells, x.new_empty(T, B, 4, dtype=computing)


def oracle(named: Named) -> Any:
    H = named["h0"].size(1)
    parts = named["norm"].split([n * H for n in VECTORS.values()])
    vectors = dict(zip(VECTORS, parts, strict=True))
    return call_reference(reference.layer_norm_lstm, named | vectors)


lstm_with_vectors.register(OP, fake, oracle)
