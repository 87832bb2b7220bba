"""Memory: what a recurrence saves for backward, and the allocator's cache of freed blocks.

A recurrence saves gates and states of every step, with rows padded to 16 elements, and nothing
else. Large results come from a cache of freed blocks; processes with other settings of the cache
test how it retains them and gives them back.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fusedseq import fused
from fusedseq.testing import differentiable, mogrifier_lstm_case


def saved_bytes(function, args, kwargs):
    """Bytes of the tensors that a call saves for backward, without its arguments.

    Each storage is counted once.
    """
    leaves = differentiable(args, kwargs)
    for leaf in leaves:
        leaf.requires_grad_()
    arguments = {t.untyped_storage().data_ptr() for t in leaves}
    saved = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in arguments:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = function(*args, **kwargs)
    assert results[0].requires_grad
    return sum(saved.values())


def padded(n):
    return -(-n // 16) * 16


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_memory_for_backward_is_gates_and_states(rounds):
    T, B, X, H = 6, 4, 33, 50
    args, kwargs = mogrifier_lstm_case(T, B, X, H, rounds=rounds).inputs()
    gates = 4 * padded(H) + (rounds + 1) // 2 * padded(X) + rounds // 2 * padded(H)
    states = padded(H) + H
    seed = 8
    allowed = 4 * T * B * (gates + states) + seed
    assert saved_bytes(fused.mogrifier_lstm, args, kwargs) <= allowed


# The files in which a control group states its limit.
LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


def read(path):
    return Path(path).read_text() if Path(path).exists() else ""


CACHE = """
import os, sys
import fusedseq, torch
from fusedseq import fused
if sys.argv[1:]:
    os.environ["FUSEDSEQ_CACHE_MB"] = sys.argv[1]
y = fused.dropout(torch.ones(3000, 1000), 0.5, 1)
in_use = fusedseq.empty_cache()
del y
print(in_use, fusedseq.empty_cache(), fusedseq.empty_cache())
"""


def test_freed_large_blocks_are_cached_until_empty_cache():
    run = subprocess.run([sys.executable, "-c", CACHE], capture_output=True, text=True, check=True)
    in_use, freed, freed_again = map(int, run.stdout.split())
    assert in_use == 0  # the block of a tensor in use is not in the cache
    assert freed >= 12_000_000
    assert freed_again == 0


def test_cache_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("FUSEDSEQ_CACHE_MB", "0")
    run = subprocess.run([sys.executable, "-c", CACHE], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "0", "0"]


@pytest.mark.parametrize("value", ["abc", "-1", "1.5", "0x10", " "])
def test_a_wrong_size_of_the_cache_is_named(value, monkeypatch):
    """By an error that names the variable and the value: when the operators are loaded, and in C++
    at the first large result, where the variable is set after that."""
    message = "FUSEDSEQ_CACHE_MB must be a whole number of MiB, at least 0, got "
    command = [sys.executable, "-c", CACHE]
    run = subprocess.run([*command, value], capture_output=True, text=True)
    assert run.returncode == 1  # not killed by a signal
    assert f"RuntimeError: {message}{value}".rstrip() in run.stderr
    monkeypatch.setenv("FUSEDSEQ_CACHE_MB", value)
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert f"ValueError: {message}{value!r}" in run.stderr


VARIED_SHAPES = """
import random, fusedseq, torch
from fusedseq import fused
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
random.seed(1)
x = torch.ones(1_000_000)
def calls(count):
    for seed in range(count):
        fused.dropout(x[: int(2 ** random.uniform(13, 20))], 0.5, seed)
    return resident()
print(calls(1000), calls(2000), fusedseq.empty_cache())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_reaches_a_plateau_under_varied_shapes(monkeypatch):
    monkeypatch.setenv("FUSEDSEQ_CACHE_MB", "32")
    command = [sys.executable, "-c", VARIED_SHAPES]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    early, late, cached = map(int, run.stdout.split())
    assert late - early < 8 << 20
    assert cached <= 32 << 20


OLDEST = """
import fusedseq, torch
from fusedseq import fused
for elements in (5_000_000, 6_000_000):
    fused.dropout(torch.ones(elements), 0.5, 1)
print(fusedseq.empty_cache())
"""


def test_a_full_cache_frees_the_blocks_released_first(monkeypatch):
    """Blocks of shapes that no longer occur would otherwise fill it for ever."""
    monkeypatch.setenv("FUSEDSEQ_CACHE_MB", "32")
    run = subprocess.run([sys.executable, "-c", OLDEST], capture_output=True, text=True, check=True)
    assert 24_000_000 <= int(run.stdout) < 32 << 20


MANY_BLOCKS = """
import fusedseq, torch
from fusedseq import fused
x = torch.ones(1 << 26)
blocks = [fused.dropout(x, 0.5, seed) for seed in range(3)]
del blocks
print(fusedseq.empty_cache())
"""


def test_the_size_of_the_cache_follows_the_memory(monkeypatch):
    """The cache holds an eighth of the memory: three blocks of 256 MiB fit from 6 GiB on."""
    monkeypatch.delenv("FUSEDSEQ_CACHE_MB", raising=False)
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") < 8 << 30:
        pytest.skip("a machine with less than 8 GiB")
    command = [sys.executable, "-c", MANY_BLOCKS]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    limits = [int(text) for text in map(read, LIMITS) if text.strip().isdigit()]
    allowed = 8 * (3 << 28)
    assert int(run.stdout) == (3 << 28 if min(limits, default=allowed) >= allowed else 2 << 28)


PAGE_FAULTS = """
import resource, torch
from fusedseq import fused
x, b = torch.randn(40, 2048), torch.randn(2048)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        fused.bias_activation_dropout(x, b, "relu")
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def test_blocks_of_some_hundred_kilobytes_are_cached_too(monkeypatch):
    """malloc would return them to the system; each call would then fault on 80 new pages."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    command = [sys.executable, "-c", PAGE_FAULTS]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 100


def test_reused_memory_does_not_change_a_result():
    """The result is the same in new memory and in a cached block that holds NaN."""
    x = torch.randn(2000, 700)
    first = fused.dropout(x, 0.5, 3)
    expected = first.clone()
    del first
    fused.dropout(torch.full_like(x, torch.nan), 0.5, 4)
    assert torch.equal(fused.dropout(x, 0.5, 3), expected)
