"""Dropout between the layers of a recurrent module."""

from torch import Tensor

from fusedseq.fused import check
from fusedseq.nn.dropout import Dropout, LockedDropout, check_probability
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
        module = type(self).__name__
        check.flag(module, "locked_input", locked_input)
        check_probability(dropout, module, "dropout")
        self.layer_dropout = (LockedDropout if locked_input else Dropout)(dropout, ops=ops)

    @property
    def dropout(self) -> float:
        """The probability that an element is dropped in training mode."""
        return self.layer_dropout.p

    @dropout.setter
    def dropout(self, p: float) -> None:
        self.layer_dropout.p = check_probability(p, type(self).__name__, "dropout")

    def _layer_input(self, l: int, x: Tensor) -> Tensor:
        dropped: Tensor = self.layer_dropout(x) if l > 0 else x
        return dropped

    def extra_repr(self) -> str:
        return shown_options(self, locked_input=isinstance(self.layer_dropout, LockedDropout))
