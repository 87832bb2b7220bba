"""Batches of independent sequences, which several processes can share."""

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, Self


class RowBatches(Sequence[Any]):
    """A sequence of batches of numbered rows; each batch is a NamedTuple with a field `items`.

    With several processes each one sees a share of the rows of every batch.
    """

    share = slice(None)  # of the rows of each batch

    @abstractmethod
    def rows(self, i: int) -> Any:
        """Returns the numbers of the rows of batch i, a list or a tensor."""

    @abstractmethod
    def batch_of(self, rows: Any) -> Any:
        """Returns the batch of the rows with these numbers."""

    def __getitem__(self, i: int) -> Any:  # type: ignore[override]  # slices are not supported
        if not 0 <= i < len(self):
            raise IndexError(i)
        rows = self.rows(i)
        own = rows[self.share]
        if len(own):
            return self.batch_of(own)
        # This process has no row of the batch, but the others wait for its gradient: it computes
        # one row that does not count.
        return self.batch_of(rows[:1])._replace(items=0)

    def shared(self, part: int, parts: int) -> Self:
        """Returns the same batches with every `parts`-th of their rows, from row `part` on.

        All parts together have each row once. A batch that would have no row has one row and 0
        items.
        """
        own = copy(self)
        own.share = slice(part, None, parts)
        return own
