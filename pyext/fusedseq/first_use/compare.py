"""Compares the kernels of an operator with its oracle on a few small cases."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fusedseq import _load, kernels
from fusedseq.first_use.verdicts import AGREES, DISAGREES, LOOP_ALONE, Verdict

FEW = 2  # cases of an operator, and as many again for the persistent kernels of a recurrence
MAX_PACKED, MAX_ROW = 16, 128  # keys of the attention kernels: kernels/attention/plan.py
MAX_COLUMNS = 4096  # of a row that one tile holds: kernels/residual_layer_norm.py
SHORTEST = 4  # steps of the persistent kernels: csrc/cuda/recurrence/plan.h
DTYPES = torch.float32, torch.bfloat16, torch.float16
HAVE_PERSISTENT_KERNELS = "lstm", "mogrifier_lstm", "mogrifier_lstm_pair"
ORDERED = {"starts", "reverse"}  # options with which these too run the loop
# Operators that torch computes on a GPU without `starts` and zoneout: fused/hidden_state.py
OF_TORCH = "gru", "rnn"
RECURRENCES = (
    *HAVE_PERSISTENT_KERNELS,
    *OF_TORCH,
    "peephole_lstm",
    "layer_norm_lstm",
    "layer_norm_gru",
)


def features(op: str, case: Any) -> set[str]:
    """Returns what of a case other kernels compute than the smallest cases run: one case with each
    is compared.
    """
    args, kwargs = case.inputs()
    if op == "attention":
        keys = max(args[0].size(2), args[1].size(2))
        size = "packed" if keys <= MAX_PACKED else "row" if keys <= MAX_ROW else "tiled"
        return {size} | {"window", "softcap", "sinks"} & kwargs.keys()
    if op == "residual_layer_norm":
        return {"long rows"} if args[0].size(-1) > MAX_COLUMNS else set()
    if op in RECURRENCES:
        given = {name for name in ("starts", "reverse", "lengths") if kwargs.get(name) is not None}
        return given | ({"steps"} if len(args[0]) >= SHORTEST else set())
    return set()


def cases_of(op: str) -> list[Any]:
    """Returns the operator's smallest cases that are not empty and run its kernels on a GPU, and
    the smallest with each of the `features`.
    """
    from fusedseq.testing import CASES

    def tensors(case: Any) -> list[torch.Tensor]:
        return [t for t in tree_leaves(case.inputs()) if isinstance(t, torch.Tensor)]

    def runs_kernels(case: Any) -> bool:
        options = case.inputs()[1]
        if op == "lstm":  # mogrifier_lstm computes an LSTM with zoneout
            return not (options.get("zoneout_h") or options.get("zoneout_c"))
        return op not in OF_TORCH or "starts" in options

    def is_ordered(case: Any) -> bool:
        return bool(ORDERED & case.inputs()[1].keys())

    sized = [(case, tensors(case)) for case in CASES if case.op == op and runs_kernels(case)]
    sized = [(case, ts) for case, ts in sized if ts and all(t.numel() for t in ts)]
    sized.sort(key=lambda found: sum(t.numel() for t in found[1]))
    few = [case for case, _ in sized[:FEW]]
    seen = {feature for case in few for feature in features(op, case)}
    for case, _ in sized[FEW:]:
        if new := features(op, case) - seen:
            few.append(case)
            seen |= new
    if op in HAVE_PERSISTENT_KERNELS:
        others = [(case, is_ordered(case), len(ts[0])) for case, ts in sized[FEW:]]
        long = [case for case, ordered, steps in others if not ordered and steps >= SHORTEST]
        few += [case for case in long[:FEW] if case not in few]
        few += [case for case, ordered, _ in others if ordered and case not in few][:1]
    return few


def disagreement(op: str, device: torch.device) -> str:
    """Returns in which case and how the kernels differ from the oracle; empty if they agree.

    An error of a kernel counts as a disagreement.
    Errors: torch.OutOfMemoryError; ImportError without Triton; RuntimeError after a lost wait
    """
    from fusedseq.testing import check, convert

    for case, dtype in _pairs(op):
        args, kwargs = convert(case.inputs(), device, dtype)
        name = f"case {case.id} in {str(dtype).removeprefix('torch.')}"
        try:
            check(op, args, kwargs)
        except TypeError as error:
            if str(dtype) not in str(error):  # the dtype is not supported there
                raise
        except AssertionError as error:
            return f"{name}: {' '.join(str(error).split())}"
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if _load.lost_wait():
                raise
            return f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return ""


def _pairs(op: str) -> Iterator[tuple[Any, torch.dtype]]:
    """The cases of an operator in all dtypes; of Triton's kernels, which are compiled for each
    dtype first, those beyond the smallest in bf16 alone.
    """
    for i, case in enumerate(cases_of(op)):
        for dtype in DTYPES if i < FEW or op not in kernels.MODULES else (torch.bfloat16,):
            yield case, dtype


def compare(op: str, device: torch.device) -> Verdict:
    """Compares an operator's kernels with its oracle; of a recurrence whose persistent kernels
    disagree, the loop alone again. FUSEDSEQ_RECURRENCE is left as it was.
    """
    why = disagreement(op, device)
    if not why:
        return Verdict(AGREES)
    before = os.environ.get("FUSEDSEQ_RECURRENCE")
    if op not in HAVE_PERSISTENT_KERNELS or before:
        return Verdict(DISAGREES, why)
    os.environ["FUSEDSEQ_RECURRENCE"] = "loop"
    try:
        return Verdict(DISAGREES if disagreement(op, device) else LOOP_ALONE, why)
    finally:
        if before is None:
            del os.environ["FUSEDSEQ_RECURRENCE"]
        else:
            os.environ["FUSEDSEQ_RECURRENCE"] = before


def compare_in_thread(op: str, device: torch.device) -> Verdict:
    """`compare` in a thread of its own, which has none of the caller's modes: neither autocast nor
    inference mode, nor the keys that the dispatcher excludes inside of a kernel.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            devices = [device] if device.type == "cuda" else []
            with torch.random.fork_rng(devices), torch.device(device):
                if devices:
                    torch.cuda.set_device(device)
                found.append(compare(op, device))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name=f"fusedseq first use of {op}")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    verdict: Verdict = found[0]
    return verdict
