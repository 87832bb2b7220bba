"""What `bidirectional_lstm` has beyond the tests of every operator: its two directions are those of
`lstm` bit for bit, however many threads there are.
"""

from importlib import import_module

import pytest
import torch
from fusedseq import fused, nn
from fusedseq.testing import bidirectional_lstm_case
from torch.profiler import ProfilerActivity, profile

from tests.support.good_calls import call

pytestmark = pytest.mark.cpu
CASES = [
    bidirectional_lstm_case(5, 4, 6, 5, lengths=[3, 0, 5, 1], starts=[(0, 1), (1, 0), (4, 2)]),
    bidirectional_lstm_case(7, 20, 33, 130, weight_drop=0.4, seed=-1, seed_reverse=3),
    bidirectional_lstm_case(4, 70, 33, 40),
]


@pytest.fixture(params=[1, 2, 3, 4], ids="threads{}".format)
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def in_two_calls(x, *tensors, starts=None, starts_reverse=None, seed=0, seed_reverse=0, **options):
    forward, reverse = tensors[:5], tensors[5:]
    y, state = fused.lstm(x, *forward, starts=starts, seed=seed, **options)
    options |= {"starts": starts_reverse, "seed": seed_reverse, "reverse": True}
    y_reverse, state_reverse = fused.lstm(x, *reverse, **options)
    return torch.cat([y, y_reverse], -1), (state, state_reverse)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_are_those_of_two_calls(case, own):
    args, kwargs = case.inputs(dtype=own)
    found = []
    for function in (fused.bidirectional_lstm, in_two_calls):
        tensors = [t.clone().requires_grad_() for t in args]
        y, (state, state_reverse) = function(*tensors, **kwargs)
        results = [y, *state, *state_reverse]
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in results]
        found.append([*results, *torch.autograd.grad(results, tensors, grads)])
    assert all(torch.equal(got, wanted) for got, wanted in zip(*found, strict=True))


def test_wrong_starts_of_the_reverse_direction():
    with pytest.raises(ValueError, match=r"^bidirectional_lstm: starts_reverse must be \(T, B\)"):
        call("bidirectional_lstm", starts_reverse=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"^bidirectional_lstm: starts_reverse must be bool"):
        call("bidirectional_lstm", starts_reverse=torch.zeros(3, 2))


def test_directions_with_states_of_different_widths():
    args, kwargs = bidirectional_lstm_case(3, 2, 5, 4).inputs()
    other, _ = bidirectional_lstm_case(3, 2, 5, 6).inputs()
    with pytest.raises(ValueError, match=r"h0_reverse must be \(B, H\) = \(2, 4\), got \(2, 6\)"):
        fused.bidirectional_lstm(*args[:6], *other[6:], **kwargs)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "bidirectional_lstm"),
        ({"weight_drop": 0.5}, "bidirectional_lstm"),
        ({"zoneout_h": 0.1}, "mogrifier_lstm"),
        ({"proj_size": 3}, "projected_lstm"),
    ],
    ids=str,
)
def test_the_module_calls_it(options, wanted):
    module = nn.LSTM(5, 4, 2, bidirectional=True, **options)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        module(torch.randn(3, 2, 5))
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts[f"fusedseq::{wanted}"] == (2 if wanted == "bidirectional_lstm" else 4)


def test_without_a_kernel_for_both_it_is_two_calls(monkeypatch):
    args, kwargs = CASES[0].inputs()
    expected = fused.bidirectional_lstm(*args, **kwargs)
    module = import_module("fusedseq.fused.bidirectional_lstm")
    monkeypatch.setattr(module, "TOGETHER", set())
    torch.testing.assert_close(fused.bidirectional_lstm(*args, **kwargs), expected, rtol=0, atol=0)


def test_explain_splits_a_call_as_the_operator_does():
    """For CUDA, where the two calls may run different kernels."""
    args, kwargs = CASES[0].inputs()
    del kwargs["starts_reverse"]
    module = import_module("fusedseq.fused.explain_cuda")
    forward, reverse = module.directions_of_call(*args, **kwargs)
    y, (state, state_reverse) = fused.bidirectional_lstm(*args, **kwargs)
    calls = fused.lstm(**forward), fused.lstm(**reverse)
    assert torch.equal(torch.cat([y_of_one for y_of_one, _ in calls], -1), y)
    assert torch.equal(calls[0][1][1], state[1])
    assert torch.equal(calls[1][1][1], state_reverse[1])


@pytest.mark.usefixtures("_threads")
def test_explain_says_whether_the_directions_run_at_the_same_time():
    args, kwargs = CASES[0].inputs()
    text = fused.explain("bidirectional_lstm", *args, **kwargs)
    assert ("at the same time" in text) == (torch.get_num_threads() % 2 == 0)
    assert ("one direction after the other" in text) == (torch.get_num_threads() % 2 == 1)
