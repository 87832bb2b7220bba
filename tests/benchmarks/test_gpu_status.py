"""The table of what was verified of each GPU kernel names every kernel and every test."""

import re

import pytest
from fusedseq.fused import recurrence_plan

from bench.gpu import status
from bench.gpu.cases import gpu_cases
from tests.simt import plan_page

CUDA = sorted((status.ROOT / "csrc/cuda").rglob("*.cu"))
TRITON = [
    p for p in sorted((status.ROOT / "kernels").rglob("*.py")) if "@triton.jit" in p.read_text()
]


def test_the_committed_page_is_up_to_date():
    """If this fails: python -m bench.gpu.status --write"""
    assert status.PAGE.read_text() == status.page()


def test_every_kernel_is_in_one_line_of_the_table():
    named = [status.ROOT / path for kernel in status.KERNELS for path in kernel.sources]
    assert sorted(named) == sorted([*CUDA, *TRITON])


@pytest.mark.parametrize("kernel", status.KERNELS, ids=lambda kernel: kernel.name)
def test_the_named_tests_and_cases_exist(kernel):
    words = " ".join((kernel.as_source, kernel.as_ptx, kernel.proved))
    for path in re.findall(r"`(tests/[\w/.]+)`", words):
        assert (status.ROOT / path).exists(), path
    assert kernel.case in (None, *(case.name for case in gpu_cases()))


@pytest.mark.parametrize("kernel", status.KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_has_a_least_time(kernel):
    assert status.limit(kernel)


def test_no_gpu_holds_the_weights_of_the_case_of_the_loop():
    (kernel,) = [kernel for kernel in status.KERNELS if "loop.cu" in kernel.sources[0]]
    (case,) = [case for case in gpu_cases() if case.name == kernel.case]
    assert case.launches
    args, kwargs = case.benchmark.inputs("meta")
    for sms, shared in plan_page.GPUS.values():
        found = recurrence_plan.plan("mogrifier_lstm", (sms, shared, True, True), *args, **kwargs)
        assert not found["forward"]["blocks"]
        assert not found["backward"]["blocks"]


def column(result):
    lines = [line for line in status.table(result).splitlines() if line.startswith("|")]
    return [line.rpartition(" | ")[2].strip(" |") for line in lines[2:]]


def test_without_a_result_no_kernel_has_run():
    assert column({}) == ["no"] * len(status.KERNELS)
    assert column({"rehearsal": "1", "parts": [{"name": "tests", "what": "done"}]}) == column({})


def test_a_result_fills_the_last_column():
    timed, failed, *_ = (kernel for kernel in status.KERNELS if kernel.case)
    result = {
        "rows": [{"name": timed.case, "times": {"fused": {"graph": {"median": 1.25e-3}}}}],
        "failed": {failed.case: "out of memory"},
        "parts": [{"name": "tests", "what": "done"}],
    }
    found = dict(zip((kernel.name for kernel in status.KERNELS), column(result), strict=True))
    assert found.pop(timed.name) == "1250 µs"
    assert found.pop(failed.name) == "FAILED: out of memory"
    assert set(found.values()) == {"tests"}
    assert status.table(result).endswith("\n\nTests of all kernels on the GPU: done.")
    result["parts"][0]["said"] = "7 collected, 5 passed, 0 failed, 2 skipped"
    assert status.table(result).endswith("GPU: 7 collected, 5 passed, 2 skipped.")
    assert "Tests of all" not in status.table({**result, "parts": []})
