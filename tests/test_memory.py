"""What a recurrence keeps for backward: gates and states, rows rounded up to 16, and nothing a step. And the memory
that operators keep for reuse."""

import subprocess
import sys

import pytest
import torch
from fusedseq import fused
from fusedseq.testing import differentiable, mogrifier_lstm_case


def saved_bytes(function, args, kwargs):
    """Bytes of the tensors saved by a call, each storage once, without those of its arguments."""
    leaves = differentiable(args, kwargs)
    for leaf in leaves:
        leaf.requires_grad_()
    given = {t.untyped_storage().data_ptr() for t in leaves}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in given:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = function(*args, **kwargs)
    assert results[0].requires_grad
    return sum(kept.values())


def padded(n):
    return -(-n // 16) * 16


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_memory_for_backward_is_gates_and_states(rounds):
    T, B, X, H = 6, 4, 33, 50
    args, kwargs = mogrifier_lstm_case(T, B, X, H, rounds=rounds).inputs()
    gates, states = 4 * padded(H) + (rounds + 1) // 2 * padded(X) + rounds // 2 * padded(H), padded(H) + H
    assert saved_bytes(fused.mogrifier_lstm, args, kwargs) <= 4 * T * B * (gates + states) + 8  # 8: the seed


CACHE = """
import fusedseq, torch
from fusedseq import fused
y = fused.dropout(torch.ones(3000, 1000), 0.5, 1)
held = fusedseq.empty_cache()
del y
print(held, fusedseq.empty_cache(), fusedseq.empty_cache())
"""


def test_large_blocks_are_kept_and_given_back():
    run = subprocess.run([sys.executable, "-c", CACHE], capture_output=True, text=True, check=True)
    held, freed, again = map(int, run.stdout.split())
    assert held == 0  # the tensor in use is not the cache's to give
    assert freed >= 12_000_000
    assert again == 0


def test_cache_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("FUSEDSEQ_CACHE_MB", "0")
    run = subprocess.run([sys.executable, "-c", CACHE], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "0", "0"]


FAULTS = """
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


def test_results_of_some_hundred_kilobytes_are_kept_too(monkeypatch):
    """malloc gives them back to the system, and each call's 80 pages are fresh ones."""
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 100


def test_memory_used_before_does_not_show():
    """The same result in fresh memory and in memory that another result has left."""
    x = torch.randn(2000, 700)
    first = fused.dropout(x, 0.5, 3)
    wanted = first.clone()
    del first
    fused.dropout(torch.full_like(x, torch.nan), 0.5, 4)
    assert torch.equal(fused.dropout(x, 0.5, 3), wanted)
