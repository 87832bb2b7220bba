"""The operators as torch calls them on CUDA, down to the kernels, without a GPU: csrc/*.cpp's CUDA side, compiled for CPU tensors
around the kernels of tests/simt, below fused.<op> in the place of the CPU's."""

import platform
import shutil
from importlib import import_module

import pytest
import torch
from fusedseq import fused, testing
from fusedseq.fused import autograd, recurrence_plan
from fusedseq.optim import NTASGD
from simt import build
from simt.memory import Simulated
from torch.utils._pytree import tree_flatten

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not shutil.which(build.CXX), reason="tests/simt needs g++ on x86-64"
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
LARGEST = 40_000  # elements of a case, and of what its weights are multiplied with: a thread is a fiber here


def work(case):
    """About how many elements its kernels go over."""
    args, _ = case.inputs()
    sizes = [t.numel() for t in tree_flatten(args)[0] if isinstance(t, torch.Tensor)]
    steps = args[0].size(0) if "lstm" in case.op else 1
    return sum(sizes) * max(1, steps)


CASES = [case for case in testing.CASES if case.op in OPERATORS and work(case) <= LARGEST]


def product(a, b, dtype, *, out):
    """What CUDA has and the CPU does not."""
    return out.copy_(a.to(dtype) @ b.to(dtype))


@pytest.fixture(scope="module")
def simulation():
    found = Simulated(build.library("plain", for_torch=True))
    found.library.simt_take_any_memory()  # torch allocates it
    return found


@pytest.fixture(scope="module")
def library(simulation):
    door = import_module("fusedseq.fused.embedding")  # the name in the package is the function's
    torch.ops.load_library(simulation.library._name)
    torch.library.register_autograd(
        "fusedseq_simulated::embedding", door.backward, setup_context=door.setup
    )  # as the operator has it; the others are called by way of autograd.call
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

    monkeypatch.setattr(torch.ops, "fusedseq", Namespace())
    for name in OPERATORS:
        monkeypatch.setitem(autograd._overloads, name, getattr(library, name).default)
    monkeypatch.setattr(import_module("fusedseq.fused.mogrifier_lstm_pair"), "OF_A_PAIR", {"cpu"})
    return calls


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case(simulated, case, own):
    """As test_operators.py holds the CPU's kernels to the oracle."""
    args, kwargs = testing.convert(case.inputs(), dtype=own)
    testing.check(case.op, args, kwargs)


def test_the_simulated_operators_were_called(simulated):
    case = next(case for case in CASES if case.op == "mogrifier_lstm")
    testing.check(case.op, *case.inputs())
    assert "mogrifier_lstm_backward" in simulated


@pytest.mark.parametrize("engine", ["loop", ""])
def test_both_engines(simulated, monkeypatch, engine):
    """The capacity rule gives the persistent one to bf16; the environment takes it away."""
    monkeypatch.setenv("FUSEDSEQ_RECURRENCE", engine)
    case = testing.mogrifier_lstm_case(4, 3, 17, 24, 5, weight_drop=0.5, seed=3, lengths=[4, 0, 2])
    args, kwargs = testing.convert(case.inputs(), dtype=torch.bfloat16)
    testing.check(case.op, args, kwargs)


def test_the_environment_picks_the_engine(simulated, monkeypatch):
    """They add up in orders of their own, which fp32 shows."""

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
    """In a wavefront, or in the loop, one after the other."""
    monkeypatch.setenv("FUSEDSEQ_RECURRENCE", engine)
    gpu = {"sms": 8, "shared": 232448, "cooperative": True}
    simulation.device(**gpu)
    lengths = {"lengths": [5, 0, 2]}
    case = testing.mogrifier_lstm_pair_case(
        5, 3, 17, 24, 20, 5, 2, first={"input_dropout": 0.3, "seed": 4, **lengths}, input_dropout=0.4, locked_input=locked, seed=3, **lengths
    )  # fmt: skip
    args, kwargs = testing.convert(case.inputs(), dtype=torch.bfloat16)
    assert recurrence_plan.wavefront((*gpu.values(),), *args)["persistent"]
    testing.check(case.op, args, kwargs, outputs=outputs)
    assert "mogrifier_lstm_pair_backward" in simulated
    simulation.device()


def test_nt_asgd(simulated, monkeypatch):
    """Steps, clipped, before and after averaging begins, against the CPU's kernel."""

    def trained(operators):
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops, "fusedseq", operators)
            torch.manual_seed(0)
            parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (3,), (130, 20))]
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
    few = 16 * torch.finfo(torch.float32).eps  # six steps, and a norm whose squares are added in another order
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=few, atol=few)


def test_what_a_kernel_does_wrong_is_an_error_of_the_operator(simulation, library):
    """Past the door, which looks at ids on the CPU alone."""
    ids, W, seed = torch.tensor([1, 9]), torch.zeros(5, 3), torch.tensor(0)
    with pytest.raises(RuntimeError, match=r"embedding: its kernels for 2 ids and W \(5, 3\): .*must be in \[0, V\)"):
        library.embedding(ids, W, 0.0, seed)
    simulation.library.simt_seed(0)  # or no launch would succeed after an assertion


def test_tensors_of_two_dtypes_are_refused_below_the_door_too(library):
    (x, *others), _ = testing.lstm_case(3, 2, 5, 7).inputs()
    with pytest.raises(RuntimeError, match="lstm: tensors must be of one dtype"):
        library.lstm(x.double(), *others, None, None, 0.0, False)
