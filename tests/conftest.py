"""Options `--device cpu|cuda|triton` and `--dtype float32|...` (by default all of the device's), and fixtures.

`--device triton` runs the Triton kernels on CPU tensors in Triton's interpreter: the properties of test_operators.py for the
operators that have such kernels, and the tests marked `triton`, which a GPU runs too.
`--device cuda` runs the tests that take the fixture `device`, or `on_device`, but those marked `cpu`: the others have nothing
of a GPU in them, and are deselected.
"""

import re
import warnings

import interpreter
import pytest
import torch
from fusedseq import fused, kernels, reference
from fusedseq.fused import check

HALVES = ["bfloat16", "float16"]
DTYPES = {
    "cpu": ["float32", "float64", "bfloat16"],
    "cuda": ["float32", "float64", *HALVES],
    "triton": ["float32", *HALVES],
}
# In fp64, which the Triton kernels do not take, or of threads, which a GPU does not have.
NOT_FOR_TRITON = (
    "test_gradcheck",
    "test_gradgradcheck",
    "test_double_backward_equals_the_oracle",
    "test_any_number_of_threads",
)


def pytest_addoption(parser):
    parser.addoption("--device", choices=list(DTYPES), default="cpu", help="where the operators run")
    parser.addoption("--dtype", choices=DTYPES["cuda"], help="only this dtype")


def pytest_configure(config):
    torch.set_num_threads(1)
    if config.getoption("device") != "triton":
        return
    interpreter.turn_on()
    with warnings.catch_warnings(action="ignore"):  # torch says that C++ kernels are being replaced
        kernels.register("CPU")
    check.DTYPES["cpu"] = check.TRITON["cpu"] = tuple(getattr(torch, name) for name in DTYPES["triton"])


def pytest_generate_tests(metafunc):
    if "dtype" in metafunc.fixturenames:
        config = metafunc.config
        chosen = [config.getoption("dtype")] if config.getoption("dtype") else DTYPES[config.getoption("device")]
        metafunc.parametrize("dtype", [getattr(torch, name) for name in chosen], ids=chosen)


def pytest_collection_modifyitems(config, items):
    device = config.getoption("device")
    chosen = [item for item in items if runs_on(device, item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def runs_on(device, item):
    if item.get_closest_marker("triton"):
        return device != "cpu"
    if device == "cuda":
        return "device" in item.fixturenames and not item.get_closest_marker("cpu")
    if device == "cpu":
        return True
    given = item.callspec.params if hasattr(item, "callspec") else {}
    if given.get("dtype") == torch.float16 and item.originalname != "test_matches_the_oracle":
        return False  # as bfloat16, and the interpreter is slow
    return getattr(given.get("case"), "op", None) in kernels.MODULES and item.originalname not in NOT_FOR_TRITON


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A dtype that an operator's door refuses on a GPU is told as skipped, in the door's words."""
    try:
        return (yield)
    except TypeError as error:
        if re.fullmatch(r"\w+: \w+ must be .* on cuda, got torch\.float64", str(error)):
            pytest.skip(str(error))
        raise


@pytest.fixture
def device(request):
    device = request.config.getoption("device")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device cuda, but torch sees no CUDA device")
    return "cpu" if device == "triton" else device


@pytest.fixture
def on_device(device):
    """Tensors and modules that are made without a device are made there."""
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@pytest.fixture(params=["fused", "reference"])
def ops(request):
    return {"fused": fused, "reference": reference}[request.param]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """Calls with another number of threads: `threads(3)`. The tests run on one, which a busy machine disturbs least."""
    yield torch.set_num_threads
    torch.set_num_threads(1)
