"""What a recurrence keeps for backward: gates and states, rows rounded up to 16, and nothing a step."""

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
