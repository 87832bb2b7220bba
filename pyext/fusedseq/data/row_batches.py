"""Batches of whole rows, which several processes can share."""

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy


class RowBatches(Sequence):
    """A sequence of batches, each a NamedTuple with `items`, made of the rows that its numbers tell of."""

    share = slice(None)  # of the rows of each batch

    @abstractmethod
    def rows(self, i):
        """-> the numbers of the rows of batch i, a list or a tensor"""

    @abstractmethod
    def batch_of(self, rows):
        """-> the batch of the rows with these numbers"""

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        rows = self.rows(i)
        own = rows[self.share]
        if len(own):
            return self.batch_of(own)
        return self.batch_of(rows[:1])._replace(
            items=0
        )  # the process works for nothing: the others wait for its gradient

    def shared(self, part, parts):
        """The same batches, of each row only every `parts`-th, from row `part`; all parts together have each row once.

        Where that leaves no row of a batch there is one all the same, with 0 items.
        """
        mine = copy(self)
        mine.share = slice(part, None, parts)
        return mine
