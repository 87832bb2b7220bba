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
    options = {"zoneout_h": 0.5, "seed": 3, "training": True}
    make = lstm if op == "lstm" else functools.partial(of_cell, op)
    args, options = make(SIZE, torch.float32, **options)
    return [t.clone().requires_grad_() for t in args], options


@KERNELS
def test_a_unit_that_is_kept_is_not_the_new_one(library, op, engine):
    args, options = inputs_of(op)
    with torch.no_grad():
        args[3].fill_(torch.nan)  # every new h is NaN
    expected, _ = getattr(reference, op)(*args, **options)
    with Simulated(library) as kernels, torch.no_grad():
        kernels.device(sms=4)
        y, _ = operators(kernels, 1, engine)[op](*args, **options)
    assert 0 < expected.isnan().sum() < expected.numel()
    torch.testing.assert_close(y, expected, equal_nan=True)


@KERNELS
def test_the_gradient_of_a_unit_that_is_kept_does_not_reach_the_cell(library, op, engine):
    args, options = inputs_of(op)
    h0 = args[-2 if "lstm" in op else -1]
    y, _ = getattr(reference, op)(*args, **options)
    kept = y[0] == h0
    assert 0 < kept.sum() < kept.numel()
    dy = torch.where(kept, torch.inf, torch.ones(()))[None]
    expected = torch.autograd.grad(y, args, dy)
    with Simulated(library) as kernels:
        kernels.device(sms=4)
        y, _ = operators(kernels, 1, engine)[op](*args, **options)
        found = torch.autograd.grad(y, args, dy)
    assert expected[1].isfinite().all()
    for n, pair in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(*pair, msg=lambda m, n=n: f"gradient {n}: {m}")
