"""The CUDA operators from `fused.<op>` down to the simulated kernels, without a GPU.

The CUDA side of csrc/ops/*.cpp is compiled for CPU tensors together with the simulated kernels and
registered as torch.ops.fusedseq_simulated, which replaces torch.ops.fusedseq in these tests.
"""

import platform
import shutil
from importlib import import_module

import pytest
import torch
from fusedseq import fused, testing
from fusedseq.fused import autograd, gradient, recurrence_plan
from fusedseq.optim import NTASGD
from torch.utils._pytree import tree_flatten

from tests.simt import build
from tests.simt.memory import Simulated

pytestmark = [
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
    "dropout",
    "locked_dropout",
    "weight_drop",
    "embedding",
    "activation_regularization",
)
LARGEST = 40_000  # of `work`, since a CUDA thread is a fiber here


def work(case):
    """Approximately how many elements the kernels of the case process."""
    args, _ = case.inputs()
    sizes = [t.numel() for t in tree_flatten(args)[0] if isinstance(t, torch.Tensor)]
    steps = args[0].size(0) if "lstm" in case.op else 1
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
        library.lstm(x.double(), *others, None, None, 0.0, False)
