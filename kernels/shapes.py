"""Checks that keep a wrong call of torch.ops.fusedseq from reading outside of its tensors.

The public functions check the same before, with better messages; csrc/ops checks it for the other
operators.
"""


def require(op, **wanted):
    """Raises an error that names the first tensor that has another shape.

    wanted: {name: (the tensor or None, its shape)}
    """
    for name, (t, shape) in wanted.items():
        if t is not None and t.shape != shape:
            refuse(op, name, tuple(shape), t)


def require_broadcast(op, **wanted):
    """The same for tensors in which each size may be 1."""
    for name, (t, shape) in wanted.items():
        if t is not None and not is_broadcast(t.shape, shape):
            refuse(op, name, f"{tuple(shape)} or 1 in some dimensions", t)


def is_broadcast(shape, wanted):
    """Returns whether a shape has as many dimensions as is wanted, each of the size or 1."""
    if len(shape) != len(wanted):
        return False
    return all(size in (1, n) for size, n in zip(shape, wanted, strict=True))


def refuse(op, name, wanted, t):
    raise RuntimeError(f"{op}: {name} must be {wanted}, got {tuple(t.shape)}")
