"""The processes that train one model together, as torchrun starts them; a run by itself is the first of one."""

import gc
import importlib
import os
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

PATIENCE = timedelta(hours=12)  # the others wait while the first validates; that one died torchrun sees by itself


class Processes:
    """rank: of this one, from 0    count: of all"""

    def __init__(self, rank=0, count=1):
        self.rank, self.count = rank, count

    @property
    def first(self):
        return self.rank == 0

    def any(self, flag):
        """Whether any process says so: what all must decide alike."""
        return self.sum(flag) > 0

    def sum(self, number):
        """The sum over the processes of a number on the host: no device is waited for."""
        return self.sum_tensor(torch.tensor(number, dtype=torch.float64)).item() if self.count > 1 else number

    def sum_tensor(self, tensor):
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def from_first(self, function):
        """The first process's result of `function`, which is called there alone."""
        if self.count == 1:
            return function()
        result = [function() if self.first else None]
        dist.broadcast_object_list(result, 0, device=torch.device("cpu"))
        return result[0]

    def gather(self, state):
        """The states of all, in order, their tensors on the CPU."""
        states = [None] * self.count
        dist.all_gather_object(states, tree_map(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t, state))
        return states


@contextmanager
def started():
    """The Processes that torchrun's environment tells of; without it, one.

    The group is gone when it ends, and gloo's threads with it. One that lived on could let go of a tensor while Python
    ends, for which it wants the interpreter; Python ends the thread, through a destructor, and that is std::terminate:
    SIGABRT after all was done. Three things keep a group alive: torch.distributed.nn, which binds the one that is there
    at its import (DDP imports it) to its arguments' defaults; DDP's modules, in cycles; the frames of an exception.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    importlib.import_module("torch.distributed.nn")  # before there is a group
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    try:
        processes = Processes(dist.get_rank(), count)
        yield processes
        with suppress(RuntimeError):  # the first may have failed, which torchrun says
            processes.sum(
                0
            )  # torchrun stops all when one has ended by a signal's code: not before the first has written
    except BaseException as error:
        _release_frames(error)
        raise
    finally:
        gc.collect()
        dist.destroy_process_group()


def _release_frames(error):
    """Lets go of the local variables of the calls that ended by `error`; the traceback stays."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def own_device(name):
    """'cuda' as the device of this process among those of its machine; others as they are."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" and "LOCAL_RANK" in os.environ else name
