"""Batches of sequences of about the same length, so that little of them is padding."""

import random


def by_length(lengths, batch, key=None):
    """How sequences go into batches: a list of lists of their numbers, each number once.

    lengths: an int, or a tuple of ints (the first decides), for each sequence    batch: sequences in one
    key: any string, e.g. seed and epoch: sequences of one length are drawn in random order, and so are the batches.
        None: the batches from the shortest to the longest
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


def padding(lengths, batches):
    """The share of padding in the ids of all batches, each padded to the longest of its sequences; 0 to 1."""
    ids = sum(lengths[i] for batch in batches for i in batch)
    return 1 - ids / sum(len(batch) * max(lengths[i] for i in batch) for batch in batches) if batches else 0.0
