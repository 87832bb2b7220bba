"""Calls of recurrent operators that need no gradients: they save nothing for a backward, and their
results are those of calls that do, bit for bit.
"""

import functools
import subprocess
import sys

import pytest
import torch
from fusedseq import fused
from fusedseq.testing import (
    CASES,
    check,
    differentiable,
    hidden_state_case,
    lstm_case,
    lstm_with_vectors_case,
    mogrifier_lstm_case,
    projected_lstm_case,
)
from torch.utils._pytree import tree_leaves

from tests.support import direct_calls
from tests.support.recorder import Recorder

pytestmark = pytest.mark.cpu
OPERATORS = (
    "bidirectional_lstm",
    "gru",
    "layer_norm_gru",
    "layer_norm_lstm",
    "lstm",
    "mogrifier_lstm",
    "peephole_lstm",
    "projected_lstm",
    "rnn",
)
# 33 rows: the inputs of 4 steps are multiplied together, and the last product has fewer steps.
LENGTHS = [11, 0, 1, 5, 8, 9] * 5 + [10, 4, 3]
STARTS = [(t, b) for t in range(11) for b in range(33) if (3 * t + b) % 7 == 0]
ORDERS = ({}, {"reverse": True}, {"reverse": True, "lengths": LENGTHS, "starts": STARTS})
SIZES = 11, 33, 20, 40
SEVERAL_BLOCKS = [
    case
    for order in ORDERS
    for case in (
        lstm_case(*SIZES, **order),
        lstm_case(*SIZES, zoneout_h=0.3, zoneout_c=0.2, seed=3, **order),
        *(hidden_state_case(op, *SIZES, **order) for op in ("gru", "rnn", "layer_norm_gru")),
        *(
            lstm_with_vectors_case(op, *SIZES, zoneout_c=0.2, seed=3, **order)
            for op in ("layer_norm_lstm", "peephole_lstm")
        ),
        projected_lstm_case(*SIZES, P=17, zoneout_c=0.2, seed=3, **order),
        mogrifier_lstm_case(*SIZES, 5, rank=3, state_dropout=0.3, seed=3, training=True, **order),
    )
]


def results(case, dtype, needs_gradients):
    args, kwargs = case.inputs(dtype=dtype)
    for t in differentiable(args, kwargs):
        t.requires_grad_(needs_gradients)
    found = tree_leaves(getattr(fused, case.op)(*args, **kwargs))
    assert all(y.requires_grad == needs_gradients for y in found)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "case", [*SEVERAL_BLOCKS, *(case for case in CASES if case.op in OPERATORS)], ids=str
)
def test_the_bits_are_those_of_a_call_that_saves(case, own):
    for got, wanted in zip(results(case, own, False), results(case, own, True), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", SEVERAL_BLOCKS[:8], ids=str)
def test_any_number_of_threads(case, count, threads):
    wanted = results(case, torch.float32, True)
    threads(count)
    for got, expected in zip(results(case, torch.float32, False), wanted, strict=True):
        assert torch.equal(got, expected)


def steps(B):
    """Calls of two steps. The widths are several panels of packed columns, whole and not."""
    return [
        lstm_case(2, B, 130, 200),
        hidden_state_case("gru", 2, B, 33, 150),
        lstm_with_vectors_case("layer_norm_lstm", 2, B, 33, 150),
        mogrifier_lstm_case(2, B, 130, 200, 5),
        mogrifier_lstm_case(2, B, 130, 150, 4, rank=210),
    ]


# More rows than dot products are for. 150 are more than one chunk, whose weights are packed as a
# whole.
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("case", steps(9) + steps(150), ids=str)
def test_a_single_step_has_the_bits_of_the_first_of_two(case, count, own, threads):
    threads(count)
    (x, *others), kwargs = case.inputs(dtype=own)
    function = getattr(fused, case.op)
    y, step = (function(steps, *others, **kwargs)[0] for steps in (x, x[:1]))
    assert torch.equal(step, y[:1])


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", [case for B in (1, 3, 8) for case in steps(B)], ids=str)
def test_a_single_step_of_few_rows(case, own, threads):
    """By dot products, with the same bits on any number of threads."""
    (x, *others), kwargs = case.inputs(dtype=own)
    args = (x[:1].clone(), *others)
    check(case.op, args, kwargs)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(getattr(fused, case.op)(*args, **kwargs)[0])
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("op", OPERATORS)
def test_a_call_without_gradients_saves_nothing(op):
    case = next(case for case in CASES if case.op == op)
    args, kwargs = case.inputs()
    with Recorder() as called:
        getattr(fused, op)(*args, **kwargs)
    assert called.names() == [f"{op}_inference"]

    inputs = differentiable(args, kwargs)
    inputs[1].requires_grad_()
    with Recorder() as called:
        getattr(fused, op)(*args, **kwargs)
    assert called.names() == [op]
    with Recorder() as called, torch.no_grad():
        getattr(fused, op)(*args, **kwargs)
    assert called.names() == [f"{op}_inference"]


@pytest.mark.parametrize("op", OPERATORS)
def test_opcheck(op):
    """The schema, and the shapes of the results on the meta device."""
    seen = []
    for case in [case for case in CASES if case.op == op][:3]:
        args, kwargs = case.inputs()
        with Recorder() as called:
            getattr(fused, op)(*args, **kwargs)
        seen += called.calls
    assert {function.name() for function, *_ in seen} == {f"fusedseq::{op}_inference"}
    for function, inputs, _ in seen:
        torch.library.opcheck(function, inputs, test_utils=("test_schema", "test_faketensor"))


@functools.cache
def lstm_inputs():
    """The arguments of `torch.ops.fusedseq.lstm`, by name."""
    return next(call for op, call in direct_calls.calls() if op == "lstm")


def test_the_operator_can_be_differentiated():
    """Where there is something to differentiate, it is the operator that saves."""
    found = []
    for function in (torch.ops.fusedseq.lstm, torch.ops.fusedseq.lstm_inference):
        given = {**lstm_inputs(), "W_hh": torch.linspace(-1, 1, 64).view(16, 4).requires_grad_()}
        y = function(**given)[0]
        found.append((y, *torch.autograd.grad(y.sum(), given["W_hh"])))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_operator_has_a_forward_mode():
    given = lstm_inputs()
    names, values = zip(*given.items(), strict=True)
    W_hh, i = given["W_hh"], names.index("W_hh")
    found = []
    for function in (torch.ops.fusedseq.lstm, torch.ops.fusedseq.lstm_inference):

        def y(W, function=function):
            return function(*values[:i], W, *values[i + 1 :])[0]

        found.append(torch.func.jvp(y, (W_hh,), (torch.ones_like(W_hh),)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)
        assert got.abs().sum() > 0


@pytest.mark.parametrize("op", ["lstm", "gru", "bidirectional_lstm"])
def test_compiled_code_calls_it(op):
    case = next(case for case in CASES if case.op == op)
    args, kwargs = case.inputs()
    wanted = tree_leaves(getattr(fused, op)(*args, **kwargs))
    called = []

    def backend(graph, _):
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(getattr(fused, op), fullgraph=True, backend=backend)
    inputs = differentiable(args, kwargs)
    for needs_gradients, name in ((False, f"{op}_inference"), (True, op)):
        for t in inputs:
            t.requires_grad_(needs_gradients)
        found = tree_leaves(compiled(*args, **kwargs))
        assert [n for n in called if n.startswith("fusedseq.")] == [f"fusedseq.{name}"]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        called.clear()
        torch.compiler.reset()


PEAK = """
import torch
from pathlib import Path
from fusedseq import fused
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
def call(T, needs_gradients):
    x, W_ih, W_hh = torch.zeros(T, 8, 16), torch.zeros(1024, 16), torch.zeros(1024, 256)
    h0, c0 = torch.zeros(2, 8, 256)
    fused.lstm(x, W_ih.requires_grad_(needs_gradients), W_hh, None, h0, c0)
for needs_gradients in (False, True):
    call(10, needs_gradients)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    call(4000, needs_gradients)
    print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_a_long_sequence_is_that_of_its_outputs():
    """x and y have 35 MB here, and the gates and states of all steps 164 MB."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    without, with_gradients = map(int, run.stdout.split())
    assert without < 60e6
    assert with_gradients > 150e6
