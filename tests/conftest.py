"""Options, fixtures and the choice of tests for the whole suite.

--device cpu|cuda|triton    where the operators run; default cpu
--dtype float32|...         run the tests that take a dtype in this one only; default all of the
                            device's dtypes

`--device triton` runs the Triton kernels on CPU tensors in Triton's interpreter: the properties of
tests/operators/test_operators.py for the operators that have such kernels, and the tests marked
`triton`, which also run on a GPU. `--device cuda` runs the tests that take the fixture `device` or
`on_device`, except those marked `cpu`; all other tests do not use the GPU and are deselected.

`make test` leaves out the tests marked `slow`, in the file or in tests/support/slow.py.
"""

import os
import re
import time
import warnings

import pytest
import torch
from fusedseq import fused, kernels, reference
from fusedseq.fused import check

from tests.support import interpreter, sampling, slow, triton_on_cpu
from tests.support.placement import exact

HALVES = ["bfloat16", "float16"]
DTYPES = {
    "cpu": ["float32", "float64", "bfloat16"],
    "cuda": ["float32", "float64", *HALVES],
    "triton": ["float32", *HALVES],
}
# Tests in fp64, which the Triton kernels do not support, and of CPU threads, which a GPU lacks.
NOT_FOR_TRITON = (
    "test_gradcheck",
    "test_gradgradcheck",
    "test_double_backward_equals_the_oracle",
    "test_any_number_of_threads",
)


def pytest_addoption(parser):
    parser.addoption(
        "--device", choices=list(DTYPES), default="cpu", help="where the operators run"
    )
    parser.addoption("--dtype", choices=DTYPES["cuda"], help="only this dtype")
    parser.addoption(
        "--sample",
        type=int,
        default=0,
        metavar="FACTOR",
        help="of a test marked sampled(n), only one case in n * FACTOR, and of the files marked "
        "sampled_files(name, n) with the same name one in n * FACTOR",
    )
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="skip the tests marked sampled(n) or sampled_files(name, n) that have not started at "
        "this time, in seconds since 1970, and run them after all others",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: not run by `make test`, only by `make test-all`")
    torch.set_num_threads(1)
    # The workers of `-n` start after this and inherit the variable. A thread that waits for one
    # that another worker keeps from its core then sleeps; by default it would use up its own core
    # for milliseconds.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if config.getoption("device") != "triton":
        return
    interpreter.enable()
    with warnings.catch_warnings(action="ignore"):  # torch warns that C++ kernels are replaced
        triton_on_cpu.register()
    check.DTYPES["cpu"] = check.TRITON["cpu"] = tuple(
        getattr(torch, name) for name in DTYPES["triton"]
    )


def pytest_generate_tests(metafunc):
    if "dtype" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    dtypes = [option("dtype")] if option("dtype") else DTYPES[option("device")]
    metafunc.parametrize("dtype", [getattr(torch, name) for name in dtypes], ids=dtypes)


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates -m "not slow"
def pytest_collection_modifyitems(config, items):
    device = config.getoption("device")
    selected = [item for item in items if runs_on(device, item)]
    if factor := config.getoption("sample"):
        selected = sampling.sample(selected, sampling.checksum_of_sources(), factor)
    if config.getoption("until"):
        selected.sort(key=sampling.is_sampled)
    kept = sampling.identities(selected)
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = selected
    slow.mark(items)


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which may compile for minutes
def pytest_runtest_setup(item):
    until = item.config.getoption("until")
    if until and sampling.is_sampled(item) and time.time() > until:
        pytest.skip("NOT CHECKED: the time of --until is over")


def runs_on(device, item):
    if item.get_closest_marker("triton"):
        return device != "cpu"
    if device == "cuda":
        return "device" in item.fixturenames and not item.get_closest_marker("cpu")
    if device == "cpu":
        return True
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if item.path.name != "test_operators.py" or "case" not in params:
        return False
    dtype = params.get("dtype", torch.float32)
    if dtype != torch.float32 and item.originalname != "test_matches_the_oracle":
        return False  # float32 tests the same code, and the interpreter is slow
    return params["case"].op in kernels.MODULES and item.originalname not in NOT_FOR_TRITON


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Skips a test when the operator rejects fp64 on a GPU; the reason is its message."""
    try:
        return (yield)
    except TypeError as error:
        if re.fullmatch(r"\w+: \w+ must be .* on cuda, got torch\.float64", str(error)):
            pytest.skip(str(error))
        raise


@pytest.fixture
def device(request):
    """The device of the tensors: cpu for --device triton."""
    device = request.config.getoption("device")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device cuda, but torch sees no CUDA device")
    return "cpu" if device == "triton" else device


@pytest.fixture
def on_device(device):
    """Makes `device` the default device of new tensors and modules."""
    torch.set_default_device(device)
    yield
    torch.set_default_device(None)


@pytest.fixture
def in_exact_dtype(on_device):
    """Makes `exact()` torch's default dtype, for properties that hold up to rounding."""
    torch.set_default_dtype(exact())
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["fused", "reference"])
def ops(request):
    """Runs the test with the fused operators and with their oracles."""
    return {"fused": fused, "reference": reference}[request.param]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """A function that sets the number of CPU threads: `threads(3)`.

    All other tests run on one thread, which a busy machine disturbs least.
    """
    yield torch.set_num_threads
    torch.set_num_threads(1)
