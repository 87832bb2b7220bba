"""Dropout between the layers of a recurrent module."""

from torch import Tensor

from fusedseq.nn.dropout import Dropout, LockedDropout
from fusedseq.nn.operators import Operators, shown_options
from fusedseq.nn.recurrent import Recurrent
from fusedseq.nn.recurrent_settings import RecurrentSettings


class RecurrentWithDropout(Recurrent):
    """A recurrent module that drops elements of the inputs of all layers but the first.

    dropout: probability that an element is dropped in training mode
    locked_input: whether there is one mask for all time steps, or one for each
    """

    def __init__(
        self, settings: RecurrentSettings, dropout: float, locked_input: bool, ops: Operators
    ) -> None:
        super().__init__(settings)
        self.layer_dropout = (LockedDropout if locked_input else Dropout)(dropout, ops=ops)

    def _layer_input(self, l: int, x: Tensor) -> Tensor:
        dropped: Tensor = self.layer_dropout(x) if l > 0 else x
        return dropped

    def extra_repr(self) -> str:
        dropout = self.layer_dropout
        return shown_options(
            self, dropout=dropout.p, locked_input=isinstance(dropout, LockedDropout)
        )
