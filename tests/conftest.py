"""Options `--device cpu|cuda` and `--dtype float32|...` (by default all of the device's), and fixtures."""

import pytest
import torch
from fusedseq import fused, reference

DTYPES = {"cpu": ["float32", "float64", "bfloat16"], "cuda": ["float32", "float64", "bfloat16", "float16"]}


def pytest_addoption(parser):
    parser.addoption("--device", choices=list(DTYPES), default="cpu", help="where the operators run")
    parser.addoption("--dtype", choices=DTYPES["cuda"], help="only this dtype")


def pytest_generate_tests(metafunc):
    if "dtype" in metafunc.fixturenames:
        config = metafunc.config
        chosen = [config.getoption("dtype")] if config.getoption("dtype") else DTYPES[config.getoption("device")]
        metafunc.parametrize("dtype", [getattr(torch, name) for name in chosen], ids=chosen)


@pytest.fixture
def device(request):
    device = request.config.getoption("device")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device cuda, but torch sees no CUDA device")
    return device


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


def pytest_configure():
    torch.set_num_threads(1)
