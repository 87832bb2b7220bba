"""The processes that train one model together, as torchrun starts them; a run by itself is the first of one."""

import os
from contextlib import contextmanager
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
        return bool(self.sum([flag])[0]) if self.count > 1 else flag

    def sum(self, numbers):
        """The sums over the processes, of numbers on the host: no device is waited for."""
        if self.count == 1:
            return numbers
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

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
    """The Processes that torchrun's environment tells of; without it, one."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()


def own_device(name):
    """'cuda' as the device of this process among those of its machine; others as they are."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" and "LOCAL_RANK" in os.environ else name
