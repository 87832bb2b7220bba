"""Chooses the blocks in which the logits of a call are computed."""

BLOCK_BYTES = 128 << 20  # of the logits that are computed together, at most
FEWEST = 1024  # rows of a chunk; with fewer, adding to dW takes longer than a fourth product


def plan(N, V, itemsize):
    """Returns (rows, columns) of a block: all columns of some rows, or all rows of some columns.
    Blocks have about the same size."""
    rows = BLOCK_BYTES // (V * itemsize)
    if rows >= min(N, FEWEST):
        return equal_part(N, max(rows, 1)), V
    most = max(1024, BLOCK_BYTES // (N * itemsize) // 128 * 128)
    return max(N, 1), -(-equal_part(V, most) // 128) * 128


def equal_part(total, most):
    """Returns the size of the parts, at least 1, if a total is cut into as few as have at most
    `most`."""
    parts = max(1, -(-total // most))
    return max(1, -(-total // parts))
