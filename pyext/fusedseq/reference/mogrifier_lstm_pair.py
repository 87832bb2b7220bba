from typing import Any

from torch import Tensor

from fusedseq.reference.mogrifier_lstm import mogrifier_lstm

State = tuple[Tensor, Tensor]  # h and c, (B, H) each


def mogrifier_lstm_pair(
    x: Tensor, first: dict[str, Any], second: dict[str, Any]
) -> tuple[tuple[Tensor, State], tuple[Tensor, State]]:
    """Two layers of a Mogrifier LSTM: the second reads the first's output, after its own
    `input_dropout`.

    x: (T, B, X)
    first, second: for each layer all arguments of `mogrifier_lstm` but x, by name; the second
        layer's X is the first layer's H
    returns (y, (h, c)) of the first layer and (y, (h, c)) of the second
    """
    y, state = mogrifier_lstm(x, **first)
    return (y, state), mogrifier_lstm(y, **second)
