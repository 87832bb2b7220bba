"""Options and fixtures: `--device cpu|cuda`, `--dtype float32|float64|bfloat16|float16` (all of the device's by default)."""

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


@pytest.fixture
def built():
    """For tests of what only a registered operator can do."""
    if fused.lstm is reference.lstm:
        pytest.skip("fusedseq.fused is the placeholder that re-exports the oracles")


@pytest.fixture(params=["fused", "reference"])
def ops(request):
    return {"fused": fused, "reference": reference}[request.param]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
