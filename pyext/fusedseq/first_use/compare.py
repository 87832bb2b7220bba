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
MAX_WIDTH = 64  # of a head in its row kernels
MAX_SPLIT, MIN_SPLIT = 4, 512  # queries and keys with which the keys are processed in parts
MAX_COLUMNS = 4096  # of a row that one tile holds: kernels/residual_layer_norm
SHORTEST = 4  # steps of the persistent kernels: csrc/cuda/recurrence/plan.h
DTYPES = torch.float32, torch.bfloat16, torch.float16
HAVE_PERSISTENT_KERNELS = "lstm", "mogrifier_lstm", "mogrifier_lstm_pair", "peephole_lstm", "gru"
ORDERED = {"starts", "reverse"}  # options for which a call has other kernels
# Operators that cuDNN computes on a GPU, if no option of a call needs the loop: `needs_loop`
BY_CUDNN = "gru", "rnn"
# {registered operator: public functions beside its own that call it}
CALLERS = {"attention": ("attention_varlen",)}
# Options of attention that the tiled kernels alone compute: kernels/attention/call.py
IN_TILES = {"window", "softcap", "sinks"}
RECURRENCES = (*HAVE_PERSISTENT_KERNELS, "rnn", "layer_norm_lstm", "layer_norm_gru")


def features(op: str, case: Any) -> set[str]:
    """Returns what of a case other kernels compute than the smallest cases run: one case with each
    is compared.
    """
    args, kwargs = case.inputs()
    if op in ("attention", "attention_varlen"):
        return attention_features(case.op, args[0], args[1], kwargs)
    if op == "residual_layer_norm":
        return {"long rows"} if args[0].size(-1) > MAX_COLUMNS else set()
    if op in RECURRENCES:
        given = {name for name in ("starts", "reverse", "lengths") if kwargs.get(name) is not None}
        given |= {name for name in ("zoneout_h", "zoneout_c") if kwargs.get(name)}
        given |= {"weight_drop"} if drops_weights(kwargs) else set()
        return given | ({"steps"} if len(args[0]) >= SHORTEST else set())
    return set()


def drops_weights(options: dict[str, Any]) -> bool:
    return bool(options.get("weight_drop") and options.get("training", True))


def needs_loop(options: dict[str, Any]) -> bool:
    """Whether cuDNN never computes a call of `gru` or `rnn` with these options."""
    return "starts" in options or bool(options.get("zoneout_h")) or drops_weights(options)


def attention_features(
    op: str, q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]
) -> set[str]:
    """Returns the kernels that a call in bf16 runs, alone and with each of its options: every
    option is compiled into the kernels of every size.
    """
    L, S, D = q.size(-2), k.size(-2), q.size(-1)
    if op == "attention_varlen":  # whose q and k are (rows, heads, D)
        kernels_of_size = "packed sequences"
    elif IN_TILES & options.keys():
        kernels_of_size = "tiled"
    elif max(L, S) <= MAX_PACKED:
        kernels_of_size = "packed"
    elif S <= MAX_ROW and L <= 4 * MAX_ROW and D <= MAX_WIDTH:
        kernels_of_size = "row"
    else:
        kernels_of_size = "split" if L <= MAX_SPLIT and S >= MIN_SPLIT else "tiled"
    given = {name for name, value in options.items() if value is not None and value is not False}
    given -= {"seed", "scale", "offset", "rope_interleaved"}
    if options.get("rope_interleaved") is False:
        given.add("halves of rope")
    if q.size(1) != k.size(1):
        given.add("shared keys")
    if D > MAX_WIDTH:
        given.add("wide heads")
    if {"mask", "dropout"} <= given:  # see `operand` in kernels/attention/tile.py
        given.add("a mask with dropout")
    return {kernels_of_size} | {f"{option}, {kernels_of_size}" for option in given}


def cases_of(op: str) -> list[Any]:
    """Returns the operator's smallest cases that are not empty and run its kernels on a GPU, and
    few more which together have all `features` of its cases.
    """
    from fusedseq.testing import CASES

    def tensors(case: Any) -> list[torch.Tensor]:
        return [t for t in tree_leaves(case.inputs()) if isinstance(t, torch.Tensor)]

    def runs_kernels(case: Any) -> bool:
        options = case.inputs()[1]
        if op == "lstm":  # mogrifier_lstm computes an LSTM with zoneout
            return not (options.get("zoneout_h") or options.get("zoneout_c"))
        return op not in BY_CUDNN or needs_loop(options)

    def is_ordered(case: Any) -> bool:
        return bool(ORDERED & case.inputs()[1].keys())

    ops = op, *CALLERS.get(op, ())
    sized = [(case, tensors(case)) for case in CASES if case.op in ops and runs_kernels(case)]
    sized = [(case, ts) for case, ts in sized if ts and all(t.numel() for t in ts)]
    sized.sort(key=lambda found: sum(t.numel() for t in found[1]))
    few = [case for case, _ in sized[:FEW]]
    found = [(case, features(op, case)) for case, _ in sized]
    left = {feature for _, its in found for feature in its}
    left -= {feature for _, its in found[:FEW] for feature in its}
    while left:  # the case with most of those that are left, and of several the smallest
        case, its = max(found, key=lambda pair: len(pair[1] & left))
        few.append(case)
        left -= its
    if op in HAVE_PERSISTENT_KERNELS:
        others = [(case, is_ordered(case), len(ts[0])) for case, ts in sized[FEW:]]
        long = [case for case, ordered, steps in others if not ordered and steps >= SHORTEST]
        few += [case for case in long[:FEW] if case not in few]
        few += [
            case
            for case, ordered, steps in others
            if ordered and steps >= SHORTEST and case not in few
        ][:1]
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
            check(case.op, args, kwargs)
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


_own = threading.local()  # of each thread


def is_comparing() -> bool:
    """Whether this thread is one of `compare_in_thread`."""
    return getattr(_own, "comparing", False)


def compare_in_thread(op: str, device: torch.device) -> Verdict:
    """`compare` in a thread of its own, which has none of the caller's modes: neither autocast nor
    inference mode, nor the keys that the dispatcher excludes inside of a kernel.
    """
    found: list[Any] = []

    def run() -> None:
        _own.comparing = True
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
