"""The CUDA operators from `fused.<op>` down to the simulated kernels, without a GPU.

The CUDA side of csrc/ops/*.cpp is compiled for CPU tensors together with the simulated kernels and
registered as torch.ops.fusedseq_simulated, which replaces torch.ops.fusedseq in these tests.
"""

import ctypes
import os
import platform
import shutil
import warnings
from importlib import import_module

import pytest
import torch
from fusedseq import fused, kernel_table, testing
from fusedseq.first_use import compare, verdicts
from fusedseq.fused import autograd, gradient, recurrence_plan
from fusedseq.optim import NTASGD
from torch.utils._pytree import tree_flatten

from tests.simt import build
from tests.simt.memory import Simulated

pytestmark = [
    pytest.mark.sampled_files("simulated GPU", 5),
    pytest.mark.cpu,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX),
        reason="tests/simt needs g++ on x86-64",
    ),
]
OPERATORS = (
    "lstm",
    "mogrifier_lstm",
    "mogrifier_lstm_pair",
    "gru",
    "rnn",
    "peephole_lstm",
    "layer_norm_lstm",
    "layer_norm_gru",
    "dropout",
    "locked_dropout",
    "weight_drop",
    "embedding",
    "activation_regularization",
)
RECURRENT = OPERATORS[:8]
LARGEST = 40_000  # of `work`, since a CUDA thread is a fiber here


def work(case):
    """Approximately how many elements the kernels of the case process."""
    args, _ = case.inputs()
    sizes = [t.numel() for t in tree_flatten(args)[0] if isinstance(t, torch.Tensor)]
    steps = args[0].size(0) if case.op in RECURRENT else 1
    return sum(sizes) * max(1, steps)


CASES = [case for case in testing.CASES if case.op in OPERATORS and work(case) <= LARGEST]


def product(a, b, dtype, *, out):
    """aten::mm.dtype_out, which torch has for CUDA only."""
    return out.copy_(a.to(dtype) @ b.to(dtype))


@pytest.fixture(scope="module")
def simulation():
    found = Simulated(build.library("plain", for_torch=True))
    found.library.simt_accept_any_memory()  # torch allocates the tensors
    return found


@pytest.fixture(scope="module")
def library(simulation):
    torch.ops.load_library(simulation.library._name)
    # The second derivative of embedding calls the registered operator itself, which therefore needs
    # its gradient; all other operators are called through autograd.call.
    rule = autograd._rules["embedding"]
    torch.library.register_autograd(
        "fusedseq_simulated::embedding", rule.backward, setup_context=rule.setup
    )
    with torch.library._scoped_library("aten", "IMPL") as aten:
        aten.impl("mm.dtype_out", product, "CPU")
        yield torch.ops.fusedseq_simulated


@pytest.fixture
def simulated(library, monkeypatch):
    calls = []

    class Namespace:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(library, name)

    def recorded(name):
        overload = getattr(library, name).default

        def run(*inputs):
            calls.append(name)
            return overload(*inputs)

        return run

    # The records in C++ and the kernels for inference call torch.ops.fusedseq by other ways.
    monkeypatch.setattr(autograd, "recorder", None)
    monkeypatch.setattr(autograd, "_recorded", {})
    monkeypatch.setattr(autograd, "INFERENCE", set())
    monkeypatch.setattr(torch.ops, "fusedseq", Namespace())
    for name in gradient.overloads:
        if hasattr(library, name):
            monkeypatch.setitem(gradient.overloads, name, recorded(name))
    monkeypatch.setattr(import_module("fusedseq.fused.mogrifier_lstm_pair"), "PAIRED", {"cpu"})
    return calls


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(simulated, case, own):
    args, kwargs = testing.convert(case.inputs(), dtype=own)
    testing.check(case.op, args, kwargs)


def test_the_simulated_operators_were_called(simulated):
    case = next(case for case in CASES if case.op == "mogrifier_lstm")
    testing.check(case.op, *case.inputs())
    assert "mogrifier_lstm_backward" in simulated


@pytest.mark.parametrize("engine", ["loop", ""])
def test_loop_and_persistent_kernels(simulated, monkeypatch, engine):
    """bf16 fits the persistent kernels; FUSEDSEQ_RECURRENCE=loop selects the loop instead."""
    monkeypatch.setenv("FUSEDSEQ_RECURRENCE", engine)
    case = testing.mogrifier_lstm_case(4, 3, 17, 24, 5, weight_drop=0.5, seed=3, lengths=[4, 0, 2])
    args, kwargs = testing.convert(case.inputs(), dtype=torch.bfloat16)
    testing.check(case.op, args, kwargs)


def test_the_environment_selects_the_kernels(simulated, monkeypatch):
    """The kernels add in different orders, so that their fp32 results differ slightly."""

    def run(engine):
        monkeypatch.setenv("FUSEDSEQ_RECURRENCE", engine)
        args, kwargs = testing.mogrifier_lstm_case(4, 3, 17, 24, 5).inputs()
        return fused.mogrifier_lstm(*testing.convert(args, dtype=torch.float32), **kwargs)[0]

    loop, persistent = run("loop"), run("")
    assert torch.equal(persistent, run(""))
    assert not torch.equal(persistent, loop)
    torch.testing.assert_close(persistent, loop)


@pytest.mark.parametrize("engine", ["loop", ""])
@pytest.mark.parametrize("outputs", [None, (3,), (0, 5)], ids=str)
@pytest.mark.parametrize("locked", [False, True])
def test_two_layers(simulated, simulation, monkeypatch, engine, outputs, locked):
    """In a wavefront of persistent kernels, or one after the other in the loop."""
    monkeypatch.setenv("FUSEDSEQ_RECURRENCE", engine)
    gpu = {"sms": 8, "shared": 232448, "cooperative": True}
    simulation.device(**gpu)
    lengths = {"lengths": [5, 0, 2]}
    first = {"input_dropout": 0.3, "seed": 4, **lengths}
    second = {"input_dropout": 0.4, "locked_input": locked, "seed": 3, **lengths}
    case = testing.mogrifier_lstm_pair_case(5, 3, 17, 24, 20, 5, 2, first=first, **second)
    args, kwargs = testing.convert(case.inputs(), dtype=torch.bfloat16)
    assert recurrence_plan.wavefront((*gpu.values(),), *args)["persistent"]
    testing.check(case.op, args, kwargs, outputs=outputs)
    assert "mogrifier_lstm_pair_backward" in simulated
    simulation.device()


def test_nt_asgd(simulated, monkeypatch):
    """Clipped steps, before and after averaging begins, agree with the CPU kernel."""

    def trained(operators):
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops, "fusedseq", operators)
            torch.manual_seed(0)
            parameters = [
                torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (3,), (130, 20))
            ]
            optimizer = NTASGD(parameters, lr=0.1, weight_decay=0.01, max_norm=1.0)
            for step in range(6):
                for p in parameters:
                    p.grad = torch.randn_like(p)
                if step == 3:
                    optimizer.start_averaging()
                optimizer.step()
            return [*parameters, *(average for _, average in optimizer.averages())]

    ours, theirs = trained(torch.ops.fusedseq), trained(torch._ops._OpNamespace("fusedseq"))
    assert "nt_asgd_step_" in simulated
    assert len(ours) == 6
    # Six steps, and a norm whose squares are added in another order.
    tolerance = 16 * torch.finfo(torch.float32).eps
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_an_error_in_a_kernel_is_an_error_of_the_operator(simulation, library):
    """The public function checks the values of ids only on the CPU; on CUDA the kernel does."""
    ids, W, seed = torch.tensor([1, 9]), torch.zeros(5, 3), torch.tensor(0)
    with pytest.raises(
        RuntimeError,
        match=r"embedding: its kernels for 2 ids and W \(5, 3\): .*must be in \[0, V\)",
    ):
        library.embedding(ids, W, 0.0, seed)
    simulation.library.simt_seed(0)  # clears the error; otherwise all later launches would fail


def test_tensors_of_two_dtypes_are_rejected_by_the_registered_operator(library):
    (x, *others), _ = testing.lstm_case(3, 2, 5, 7).inputs()
    with pytest.raises(RuntimeError, match="lstm: W_ih must be float64, got float32"):
        library.lstm(x.double(), None, False, *others, None, None, 0.0, False)


# ---- calls that cannot run as planned


def test_after_a_lost_wait_every_call_gives_the_reason(simulated, simulation):
    """The public operator raises it before any call of CUDA, whose error would hide it."""
    (args, kwargs), lost = testing.lstm_case(4, 3, 17, 24).inputs(), (1 << 16 | 3, 5, 7, 6)
    simulation.library.set_lost_wait(*lost)
    message = r"lstm: .*block 2 \(warp group 1\) read the flag of block 5 .* epoch 7.* epoch 6"
    try:
        with pytest.raises(RuntimeError, match=message):
            fused.lstm(*testing.convert(args, dtype=torch.bfloat16), **kwargs)
    finally:
        simulation.forget_lost_wait()


@pytest.fixture
def refusing(simulation):
    """A device that refuses cooperative launches of more than one block, which no attribute
    tells.
    """
    simulation.device(sms=8, resident=1)
    yield
    simulation.device()


def test_a_refused_launch_runs_the_loop_and_warns_once(simulated, refusing, capfd):
    """torch prints a warning of C++ to standard error."""
    case = testing.mogrifier_lstm_case(4, 3, 17, 24, 5)
    args, kwargs = testing.convert(case.inputs(), dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        testing.check(case.op, args, kwargs)
        testing.check(case.op, args, kwargs)
    warned = [str(w.message) for w in caught] + [capfd.readouterr().err]
    assert "".join(warned).count("refused the cooperative launch") == 1


@pytest.mark.parametrize("locked", [False, True])
def test_a_refused_wavefront_runs_one_layer_after_the_other(simulated, refusing, locked):
    more = {"input_dropout": 0.4, "locked_input": locked, "seed": 3}
    case = testing.mogrifier_lstm_pair_case(5, 3, 17, 24, 20, 5, 2, first={"seed": 4}, **more)
    args, kwargs = testing.convert(case.inputs(), dtype=torch.bfloat16)
    testing.check(case.op, args, kwargs)


@pytest.mark.parametrize("refused", ["forward", "backward"])
def test_one_direction_persistent_and_the_other_refused(simulated, simulation, refused):
    """Both engines save the same tensors for backward."""
    args, kwargs = testing.mogrifier_lstm_case(4, 3, 17, 24, 5).inputs()
    args = testing.convert(args, dtype=torch.float32)
    found = {}
    for name, resident in (("none", (99, 99)), (refused, (1, 99)), ("other", (99, 99))):
        leaves = [t.detach().requires_grad_() for t in args]
        first, second = resident if refused == "forward" else resident[::-1]
        simulation.device(sms=8, resident=first)
        y, _ = fused.mogrifier_lstm(*leaves, **kwargs)
        simulation.device(sms=8, resident=second)
        found[name] = [y, *torch.autograd.grad(y.square().sum(), leaves)]
    simulation.device()
    for a, b, c in zip(*found.values(), strict=True):
        torch.testing.assert_close(a, b)
        assert torch.equal(a, c)


def test_kernels_are_allowed_all_shared_memory_of_the_device(simulated, simulation):
    """Also by a small layer, as another thread may be about to launch a large one."""
    simulation.device(sms=8)
    case = testing.mogrifier_lstm_case(4, 3, 17, 24, 5)
    testing.check(case.op, *testing.convert(case.inputs(), dtype=torch.bfloat16))
    assert simulation.library.simt_least_allowed() == 232448
    simulation.device()


# ---- measured engines, and the comparison at the first use


@pytest.mark.parametrize(("engine", "as_loop"), [(0, False), (1, True), (2, False)])
def test_a_measured_engine_is_run(simulated, simulation, monkeypatch, engine, as_loop):
    """Of the table of csrc/ops/engine_table.h: the loop in place of what the plan prefers."""
    (T, B, X, H), rounds = (4, 3, 17, 24), 5
    args, kwargs = testing.mogrifier_lstm_case(T, B, X, H, rounds).inputs()
    args = testing.convert(args, dtype=torch.float32)
    simulation.device(sms=8)
    entry = (ctypes.c_int64 * 9)(8, 90, 0, B, X, H, rounds, 0, 0)
    simulation.library.fusedseq_set_engine(entry, ctypes.c_int64(engine))
    found = fused.mogrifier_lstm(*args, **kwargs)[0]
    simulation.library.fusedseq_set_engine(entry, ctypes.c_int64(0))
    assert torch.equal(found, fused.mogrifier_lstm(*args, **kwargs)[0]) is not as_loop
    monkeypatch.setenv("FUSEDSEQ_RECURRENCE", "loop")
    assert torch.equal(found, fused.mogrifier_lstm(*args, **kwargs)[0]) is as_loop
    simulation.device()


@pytest.mark.parametrize(
    ("engine", "resident", "launches"),
    [("persistent", 8, 2), ("persistent", 6, 0), ("persistent words", 6, 2), ("loop", 8, 0)],
)
def test_a_measured_exchange_is_run(simulated, simulation, engine, resident, launches):
    """Blocks of the exchange by words own even numbers of columns, so that it needs fewer blocks,
    which are resident here where those of the exchange by flags are not and the loop runs."""
    (T, B, X, H), rounds = (4, 3, 16, 24), 5
    args, kwargs = testing.mogrifier_lstm_case(T, B, X, H, rounds).inputs()
    args = testing.convert(args, dtype=torch.bfloat16)
    key = ctypes.c_int64 * 9
    entry = key(8, 90, kernel_table.TYPES["bfloat16"], B, X, H, rounds, 0, 0)
    number = kernel_table.ENGINES["mogrifier_lstm"][engine]
    simulation.device(sms=8, resident=resident)
    simulation.library.fusedseq_set_engine(entry, ctypes.c_int64(number))
    before = simulation.library.simt_cooperative_launches()
    testing.check("mogrifier_lstm", args, kwargs)
    assert simulation.library.simt_cooperative_launches() == before + launches
    simulation.library.fusedseq_set_engine(entry, ctypes.c_int64(0))
    simulation.device()


@pytest.mark.parametrize("op", OPERATORS)
def test_the_simulated_kernels_agree_at_their_first_use(simulated, simulation, op, monkeypatch):
    monkeypatch.setattr(autograd, "_recorded", {})  # records in C++ call the CPU's kernels
    simulation.device(sms=8)
    assert compare.compare(op, torch.device("cpu")).found == verdicts.AGREES
    assert simulated
    simulation.device()


def test_wrong_persistent_kernels_are_found_at_their_first_use(simulated, simulation, monkeypatch):
    """A double adds an error to what they return; the loop is right."""
    monkeypatch.delenv("FUSEDSEQ_RECURRENCE", raising=False)
    simulation.device(sms=8)
    right = gradient.overloads["mogrifier_lstm"]

    def wrong(*inputs):
        y, *others = right(*inputs)
        return (y if os.environ.get("FUSEDSEQ_RECURRENCE") else 1.1 * y, *others)

    monkeypatch.setitem(gradient.overloads, "mogrifier_lstm", wrong)
    verdict = compare.compare("mogrifier_lstm", torch.device("cpu"))
    assert verdict.found == verdicts.LOOP_ALONE
    assert "result 0: error" in verdict.why
    simulation.device()
