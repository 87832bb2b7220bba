"""What csrc/recurrence_plan.h says of a call of lstm or mogrifier_lstm on a GPU, in words: for `explain`."""

import inspect
import os

import torch

from fusedseq import reference

LOOP = {
    "lstm": "csrc/recurrence_loop.cu, torch's product and a kernel a step; the input's product hoisted",
    "mogrifier_lstm": "csrc/recurrence_loop.cu, torch's product and a kernel for each round and the gates of a step",
}


def plan(op, gpu, *args, **kwargs):
    """The plan of a call: a dict of `_C.recurrence_plan`.

    gpu: (SMs, bytes of shared memory that a block can have, whether it has cooperative launches)
    """
    from fusedseq import _C  # here: it is for one version of Python, and no operator needs it

    bound = inspect.signature(getattr(reference, op)).bind(*args, **kwargs)
    T, B, X = bound.arguments["x"].shape
    return _C.recurrence_plan(T, B, X, *size(**bound.arguments), bound.arguments["x"].element_size(), *gpu)


def wavefront(gpu, x, first, second):
    """As `plan`, of a call of mogrifier_lstm_pair: a dict of `_C.wavefront_plan`."""
    from fusedseq import _C

    (T, B, X), of_first, of_second = x.shape, size(**first), size(**second)
    return _C.wavefront_plan(T, B, (X, *of_first), (of_first[0], *of_second), x.element_size(), *gpu)


def size(h0, rounds=0, Q=None, R=None, **_):
    """H, rounds, and how many different weights these have on x and on h."""
    uses = ((Q, (rounds + 1) // 2), (R, rounds // 2))
    return h0.size(1), rounds, *(weights(weight, count) if count else 0 for weight, count in uses)


def weights(weight, uses):
    """How many different ones there are."""
    return min(uses, len(weight if isinstance(weight, torch.Tensor) else weight[0]))


def this_gpu(device):
    facts = torch.cuda.get_device_properties(device)
    # (torch's type stubs do not know the attribute)
    return facts.multi_processor_count, getattr(facts, "shared_memory_per_block_optin"), facts.major >= 6  # noqa: B009


def layout(direction, found):
    copies = f"{found['replicas']} x " if found["replicas"] > 1 else ""
    kept = f", {found['kept']} steps along K of W_ih in registers" if found["kept"] else ""
    inputs = f" and {found['columns_x']} inputs" if found["columns_x"] else ""
    return (
        f"{direction} {copies}{found['blocks']} blocks of {found['columns_h']} units{inputs}, {found['groups']} group"
        f"{'s' * (found['groups'] > 1)} of rows, {found['shared'] / 1024:.0f} KiB of shared memory{kept}"
    )


def explain_pair(gpu, *args, **kwargs):
    """Whether both layers run at once, how they are laid out, and why."""
    try:
        found = wavefront(gpu, *args, **kwargs)
    except ImportError:
        return "csrc/wavefront.cu or one layer after the other: fusedseq._C, which knows, is for another Python"
    if os.environ.get("FUSEDSEQ_RECURRENCE") == "loop":
        return "one layer after the other; FUSEDSEQ_RECURRENCE is loop"
    if not found["persistent"]:
        return f"one layer after the other: {found['why']}"
    return f"csrc/wavefront.cu, both layers at once: {found['why']}; " + "; ".join(
        layout(f"{number} {direction}", found[direction][l])
        for direction in ("forward", "backward")
        for l, number in enumerate(("first", "second"))
    )


def explain(op, gpu, *args, **kwargs):
    """Which engine, how it is laid out, and why."""
    if os.environ.get("FUSEDSEQ_RECURRENCE") == "loop":
        return f"{LOOP[op]}; FUSEDSEQ_RECURRENCE is loop"
    try:
        found = plan(op, gpu, *args, **kwargs)
    except ImportError:
        return "csrc/persistent_forward.cu or csrc/recurrence_loop.cu: fusedseq._C, which knows, is for another Python"
    if not found["persistent"]:
        return f"{LOOP[op]}; not persistent: {found['why']}"
    return f"csrc/persistent_forward.cu, csrc/persistent_backward.cu: {found['why']}; " + "; ".join(
        layout(direction, found[direction]) for direction in ("forward", "backward")
    )
