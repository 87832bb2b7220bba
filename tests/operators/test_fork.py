"""A forked child uses threads although its parent had used them before.

fork copies the calling thread alone. Without csrc/ops/fork.cpp the OpenMP runtime of the child
waits for the threads of the parent, in torch's operators and in ours.
"""

import os
import subprocess
import sys

import pytest

# The child ends by SIGALRM if it hangs, with 3 if its result is wrong, else with 0.
CHILD = """
import os, signal, sys, threading, torch
from fusedseq import fused

def check_a_child(call, expected):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if torch.equal(call(), expected) else 3)
    assert os.waitpid(child, 0)[1] == 0, "the child did not end with 0"
"""
FORK = """
torch.set_num_threads(2)
x = torch.randn(300, 300)
call = {"linear": lambda: fused.linear(x, x), "torch": lambda: (torch.rand(3, 99999) * 0).relu()}
call = call[sys.argv[1]]
expected = call()
for _ in range(2):
    check_a_child(call, expected)
    assert torch.equal(call(), expected)
"""


# Two threads take memory from the cache of csrc/cpu/memory.cpp all the time, and mostly one of them
# holds its mutex while a third one forks.
CACHE = """
torch.set_num_threads(1)
x, seed = torch.ones(1 << 15), torch.tensor(3)  # 128 KiB, the smallest that is cached
call = lambda: fused.dropout(x, 0.5, seed)
expected = call()
def loop():
    while True:
        call()
for _ in range(2):
    threading.Thread(target=loop, daemon=True).start()
for _ in range(150):
    check_a_child(call, expected)
os._exit(0)
"""

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@needs_fork
@pytest.mark.parametrize("op", ["linear", "torch"])
def test_a_forked_child_uses_threads(op):
    command = [sys.executable, "-c", CHILD + FORK, op]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@needs_fork
def test_a_forked_child_has_memory_although_other_threads_had_locked_it():
    run = subprocess.run([sys.executable, "-c", CHILD + CACHE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
