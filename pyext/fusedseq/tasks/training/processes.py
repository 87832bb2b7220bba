"""The processes that train one model together, as torchrun starts them; without it, one process."""

import gc
import importlib
import os
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

# The timeout of collective operations. The other processes wait while the first one validates;
# torchrun itself notices a process that died.
PATIENCE = timedelta(hours=12)


class Processes:
    """The processes of a run. rank: of this process, from 0    count: the number of processes"""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    @property
    def first(self) -> bool:
        """Whether this is the process that validates and writes files."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Returns in every process whether `flag` is true in any, for decisions taken jointly."""
        return self.sum(flag) > 0

    def sum(self, number: float) -> float:
        """The sum of a host number over all processes; it does not synchronize with a device."""
        if self.count == 1:
            return number
        return self.sum_tensor(torch.tensor(number, dtype=torch.float64)).item()

    def sum_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes, computed in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def from_first(self, function: Callable[[], Any]) -> Any:
        """Calls `function` in the first process alone and returns its result in all of them."""
        if self.count == 1:
            return function()
        result = [function() if self.first else None]
        dist.broadcast_object_list(result, 0, device=torch.device("cpu"))
        return result[0]

    def gather(self, state: Any) -> list:
        """The states of all processes in order of rank, with their tensors on the CPU."""
        states: list = [None] * self.count
        dist.all_gather_object(
            states, tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, state)
        )
        return states


@contextmanager
def started() -> Iterator[Processes]:
    """Yields the Processes that torchrun's environment variables describe, or a single one.

    The process group, and gloo's threads with it, are destroyed at the end of the block. If a group
    outlived it, one of its threads could release a tensor while Python shuts down; releasing needs
    the interpreter, Python then ends the thread inside a C++ destructor, and the program aborts
    (std::terminate, SIGABRT) after all work was done. Three things keep a group alive:
    torch.distributed.nn, which binds the group that exists at its import (DDP imports it) to
    default arguments; DDP modules, which are in reference cycles; the frames of an exception.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not (text.isdecimal() and int(text) >= 1):
        raise ValueError(f"$WORLD_SIZE must be a whole number from 1, as torchrun's, got {text!r}")
    count = int(text)
    if count == 1:
        yield Processes()
        return
    importlib.import_module("torch.distributed.nn")  # must happen before a group exists
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE
    )
    try:
        processes = Processes(dist.get_rank(), count)
        yield processes
        # A barrier: when one process ends with a signal's exit code, torchrun stops the others,
        # which must not happen before the first has written its files. It fails if the first
        # process failed, which torchrun reports.
        with suppress(RuntimeError):
            processes.sum(0)
    except BaseException as error:
        _release_frames(error)
        raise
    finally:
        gc.collect()
        dist.destroy_process_group()


def _release_frames(error: BaseException | None) -> None:
    """Clears the local variables of the calls that ended in `error`; the traceback remains."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def seed_of_rank(seed: int, rank: int) -> int:
    """The seed of the generators of process `rank` > 0 in a run with the seed `seed`.

    It is a hash of both numbers. A sum would give rank 1 of one run the random numbers of rank 0 of
    the run with the next seed.
    """
    return random.Random(f"{seed}/rank {rank}").getrandbits(63)


def own_device(name: str) -> str:
    """The device of this process: 'cuda' becomes 'cuda:LOCAL_RANK' under torchrun."""
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return name
