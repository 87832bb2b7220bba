"""Zoneout on a simulated GPU: what it leaves out may be NaN or infinite.

tests/operators/test_values_that_are_not_finite.py is the same for the CPU.
"""

import functools
import platform
import shutil

import pytest
import torch
from fusedseq import reference

from tests.simt import build
from tests.simt.memory import Simulated
from tests.simt.recurrence import operators
from tests.simt.test_simt_persistent import SMALL
from tests.simt.test_simt_recurrence import lstm, of_cell

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
SIZE = (1, 3, 5, 17)  # T, B, X, H
KERNELS = pytest.mark.parametrize(
    ("op", "engine"),
    [
        ("lstm", "loop"),
        ("lstm", "persistent"),
        ("gru", "persistent"),
        ("peephole_lstm", "persistent"),
        ("layer_norm_gru", "loop"),
        ("layer_norm_lstm", "loop"),
    ],
)


@pytest.fixture(scope="module")
def library():
    return build.library("plain", SMALL)


def inputs_of(op):
    """Arguments, of which number 3 is the bias, and options."""
    options = {"zoneout_h": 0.5, "zoneout_c": 0.5, "seed": 3, "training": True}
    make = lstm if op == "lstm" else functools.partial(of_cell, op)
    args, options = make(SIZE, torch.float32, **options)
    return [t.clone().requires_grad_() for t in args], options


def states_of(function, args, options):
    """The state after the one step of a call: h, and c if the cell has it."""
    _, states = function(*args, **options)
    return states if isinstance(states, tuple) else (states,)


@KERNELS
def test_a_unit_that_is_kept_is_not_the_new_one(library, op, engine):
    args, options = inputs_of(op)
    with torch.no_grad():
        args[3].fill_(torch.nan)  # every new state is NaN
    expected = states_of(getattr(reference, op), args, options)
    with Simulated(library) as kernels, torch.no_grad():
        kernels.device(sms=4)
        found = states_of(operators(kernels, 1, engine)[op], args, options)
    for pair in zip(found, expected, strict=True):
        assert 0 < pair[1].isnan().sum() < pair[1].numel()
        torch.testing.assert_close(*pair, equal_nan=True)


@KERNELS
def test_the_gradient_of_a_unit_that_is_kept_does_not_reach_the_cell(library, op, engine):
    args, options = inputs_of(op)
    states = states_of(getattr(reference, op), args, options)
    kept = [after == before for after, before in zip(states, args[-len(states) :], strict=True)]
    assert all(0 < units.sum() < units.numel() for units in kept)
    gradients = [torch.where(units, torch.inf, torch.ones(())) for units in kept]
    expected = torch.autograd.grad(states, args, gradients)
    with Simulated(library) as kernels:
        kernels.device(sms=4)
        states = states_of(operators(kernels, 1, engine)[op], args, options)
        found = torch.autograd.grad(states, args, gradients)
    assert expected[1].isfinite().all()
    for n, pair in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(*pair, msg=lambda m, n=n: f"gradient {n}: {m}")
