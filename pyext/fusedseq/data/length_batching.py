"""Batches of sequences of similar length, so that little of them is padding."""

import random
from collections.abc import Sequence

Length = int | tuple[int, ...]


def by_length(lengths: Sequence[Length], batch: int, key: str | None = None) -> list[list[int]]:
    """Returns batches of the numbers of sequences, each number once.

    lengths: for each sequence an int, or a tuple of ints that are compared in order
    batch: sequences in a batch
    key: any string, e.g. seed and epoch, from which the order of the batches, and of sequences of
        equal length, is drawn. None: the batches from the shortest to the longest sequences
    Errors: ValueError for a batch below 1.
    """
    if batch < 1:
        raise ValueError(f"by_length: batch must be at least 1, got {batch}")
    order = list(range(len(lengths)))
    rng = random.Random(key)
    if key is not None:
        rng.shuffle(order)
    order.sort(key=lambda i: lengths[i])  # stable
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    if key is not None:
        rng.shuffle(batches)
    return batches


def padding(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Returns the fraction of padding in the ids of all batches, 0 to 1.

    Each batch is padded to the longest of its sequences.
    """
    if not batches:
        return 0.0
    ids = sum(lengths[i] for batch in batches for i in batch)
    return 1 - ids / sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
