"""For `explain`: which CUDA kernels run a call of a recurrence, in words; those of lstm,
mogrifier_lstm, peephole_lstm and gru by csrc/cuda/recurrence/plan.h.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from fusedseq import kernel_table, reference
from fusedseq._load import variable

FOLDER = "csrc/cuda/recurrence"
PERSISTENT = f"{FOLDER}/persistent_forward.cu, {FOLDER}/persistent_backward.cu"
CELLS = f"{FOLDER}/persistent_cells.cu"
WAVEFRONT = f"{FOLDER}/wavefront.cu"
LOOP = dict.fromkeys(
    ("lstm", "peephole_lstm", "gru"),
    f"{FOLDER}/loop.cu, one torch product and one kernel a step; the input's product is computed"
    " for many steps at once",
) | {
    "mogrifier_lstm": f"{FOLDER}/loop.cu, one torch product and one kernel for each round and for"
    " the gates of a step"
}
LOOP_ALONE = dict.fromkeys(
    ("rnn", "layer_norm_lstm", "layer_norm_gru"),
    f"{LOOP['lstm']}; no persistent kernel has this cell",
)
# {engine of a kernel table: protocol of the exchange between blocks}
PROTOCOLS: dict[str | None, str] = {"persistent": "flags", "persistent words": "words"}
MEASURED = "as FUSEDSEQ_KERNEL_TABLE says"
Gpu = tuple[int, int, bool]  # see `plan`
OTHER_PYTHON = "fusedseq._C, which decides, was built for another version of Python"


def plan(
    op: str, gpu: Gpu, *args: Any, protocol: str = "estimate", **kwargs: Any
) -> dict[str, Any]:
    """Returns the plan of a call of `op` as the dict of `_C.recurrence_plan`.

    gpu: (number of SMs, bytes of shared memory that a block can have, whether it has cooperative
    launches)    protocol: of the exchange between blocks, as of `_C.recurrence_plan`
    """
    # Imported here, because _C depends on the version of Python, and no operator needs it.
    from fusedseq import _C

    given = inspect.signature(getattr(reference, op)).bind(*args, **kwargs).arguments
    T, B, X = given["x"].shape
    element_size = given["x"].element_size()
    found: dict[str, Any] = _C.recurrence_plan(
        T,
        B,
        X,
        *size(**given),
        element_size,
        *gpu,
        protocol=protocol,
        gates=3 if op == "gru" else 4,
        cells=needs_cells(op, given),
    )
    return found


def needs_cells(op: str, given: Mapping[str, Any]) -> bool:
    """Whether the persistent kernels of a call are those of persistent_cells.cu. given: the call's
    arguments
    """
    in_order = given.get("starts") is None and not given.get("reverse")
    return op in ("peephole_lstm", "gru") or not in_order


def runs_loop(x: torch.Tensor, h0: torch.Tensor) -> bool:
    """Whether the loop runs both directions of a plain LSTM; False if fusedseq._C was built for
    another version of Python.
    """
    return _runs_loop((*x.shape, h0.size(1)), x.element_size(), this_gpu(x.device))


@functools.lru_cache(maxsize=256)
def _runs_loop(sizes: tuple[int, ...], element_size: int, gpu: Gpu) -> bool:
    try:
        from fusedseq import _C
    except ImportError:
        return False
    found: dict[str, Any] = _C.recurrence_plan(*sizes, 0, 0, 0, element_size, *gpu)
    return not (found["forward"]["blocks"] or found["backward"]["blocks"])


def wavefront(
    gpu: Gpu, x: torch.Tensor, first: dict[str, Any], second: dict[str, Any]
) -> dict[str, Any]:
    """Returns the plan of a call of mogrifier_lstm_pair as the dict of `_C.wavefront_plan`; `gpu`
    as in `plan`.
    """
    from fusedseq import _C

    T, B, X = x.shape
    size_first, size_second = size(**first), size(**second)
    H = size_first[0]
    layers = (X, *size_first), (H, *size_second)
    found: dict[str, Any] = _C.wavefront_plan(T, B, *layers, x.element_size(), *gpu)
    return found


def size(
    h0: torch.Tensor, rounds: int = 0, Q: Any = None, R: Any = None, **_: Any
) -> tuple[int, ...]:
    """Returns H, the number of rounds, and the numbers of distinct weights of the rounds on x and
    on h.
    """
    uses = ((Q, (rounds + 1) // 2), (R, rounds // 2))
    return h0.size(1), rounds, *(distinct(weight, count) if count else 0 for weight, count in uses)


def distinct(weight: Any, uses: int) -> int:
    """Returns the number of distinct weights of `uses` rounds; weight: a tensor, or its two
    factors.
    """
    return min(uses, len(weight if isinstance(weight, torch.Tensor) else weight[0]))


def this_gpu(device: torch.device) -> Gpu:
    """Returns the `gpu` argument of `plan` for a device of this machine."""
    facts: Any = torch.cuda.get_device_properties(device)  # the stubs lack an attribute
    return facts.multi_processor_count, facts.shared_memory_per_block_optin, facts.major >= 6


def measured(op: str, gpu: Gpu, x: torch.Tensor, *layers: tuple[int, ...]) -> str | None:
    """Returns the engine that the kernel table in use names for a call, or None.

    layers: H and the number of rounds of each layer
    """
    _, B, X = x.shape
    dtype = str(x.dtype).removeprefix("torch.")
    sizes = [number for layer in layers for number in layer]
    return kernel_table.engines.get((gpu[0], op, dtype, B, X, *sizes))


def layout(direction: str, found: dict[str, Any]) -> str:
    """Describes one layout of a plan."""
    slices = f"{found['slices']} launches of " if found["slices"] > 1 else ""
    replicas = f"{found['replicas']} x " if found["replicas"] > 1 else ""
    inputs = f" and {found['columns_x']} inputs" if found["columns_x"] else ""
    groups = f"{found['groups']} group{'s' * (found['groups'] > 1)} of rows"
    resident = found["resident"]
    words = ", words in place of flags" if found["words"] else ""
    registers = f", {resident} steps along K of W_ih in registers" if resident else ""
    units = f"{found['blocks']} blocks of {found['columns_h']} units"
    shared = f"{found['shared'] / 1024:.0f} KiB of shared memory"
    if not found["blocks"]:
        return f"{direction} {FOLDER}/loop.cu"
    return f"{direction} {slices}{replicas}{units}{inputs}, {groups}, {shared}{registers}{words}"


def refused(protocol: str, found: dict[str, Any]) -> list[str]:
    """Says which directions of a plan have flags although the table names words."""
    with_flags = [
        direction
        for direction in ("forward", "backward")
        if found[direction]["blocks"] and not found[direction]["words"]
    ]
    if protocol != "words" or not with_flags:
        return []
    return [
        f"{' and '.join(with_flags)} by flags, since words do not fit there: the page"
        " docs/gpu-plans.md says what they need"
    ]


def explain_pair(gpu: Gpu, *args: Any, **kwargs: Any) -> str:
    """Says whether both layers run in one launch, why, and with which layouts."""
    try:
        found = wavefront(gpu, *args, **kwargs)
    except ImportError:
        return f"{WAVEFRONT} or one layer after the other: {OTHER_PYTHON}"
    if variable("FUSEDSEQ_RECURRENCE", "loop"):
        return "one layer after the other; FUSEDSEQ_RECURRENCE is loop"
    given = inspect.signature(reference.mogrifier_lstm_pair).bind(*args, **kwargs).arguments
    layers = (size(**given[name])[:2] for name in ("first", "second"))
    if measured("mogrifier_lstm_pair", gpu, given["x"], *layers) == "in turn":
        return f"one layer after the other, {MEASURED}"
    if not found["persistent"]:
        return f"one layer after the other: {found['why']}"
    layouts = (
        layout(f"{number} {direction}", found[direction][l])
        for direction in ("forward", "backward")
        for l, number in enumerate(("first", "second"))
    )
    return f"{WAVEFRONT}, both layers in one launch: {found['why']}; {'; '.join(layouts)}"


def explain(op: str, gpu: Gpu, *args: Any, **kwargs: Any) -> str:
    """Says which kernels run a call of `op`, why, and with which layouts."""
    if variable("FUSEDSEQ_RECURRENCE", "loop"):
        return f"{LOOP[op]}; FUSEDSEQ_RECURRENCE is loop"
    given = inspect.signature(getattr(reference, op)).bind(*args, **kwargs).arguments
    in_cells = needs_cells(op, given)
    try:
        engine = None if in_cells else measured(op, gpu, given["x"], size(**given)[:2])
        protocol = PROTOCOLS.get(engine, "estimate")
        found = plan(op, gpu, *args, protocol=protocol, **kwargs)
    except ImportError:
        return f"{PERSISTENT} or {FOLDER}/loop.cu: {OTHER_PYTHON}"
    if engine == "loop":
        return f"{LOOP[op]}; {MEASURED}"
    if not (found["forward"]["blocks"] or found["backward"]["blocks"]):
        return f"{LOOP[op]}; not persistent: {found['why']}"
    layouts = (layout(direction, found[direction]) for direction in ("forward", "backward"))
    text = f"{CELLS if in_cells else PERSISTENT}: {found['why']}; {'; '.join(layouts)}"
    return "; ".join([text, *refused(protocol, found)])
