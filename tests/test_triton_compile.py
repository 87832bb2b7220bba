"""Every Triton kernel that ships, compiled for each GPU on a machine without one: see triton_table.py."""

from pathlib import Path

import pytest
import triton_table

pytest.importorskip("triton")
ROWS = [(call, gpu) for call in triton_table.CALLS for gpu in triton_table.CAPABILITIES]


@pytest.fixture(scope="module")
def found():
    return triton_table.compile_all()


# Bytes a thread, in heads that go by chunks of D: every smaller tile tried spilled too, on one GPU or another.
SPILLS = {
    "attention-L1024-S1024-D128-fp32-rope-causal-dropout0.1-lengths-alibi-bias-mask": 32,
    "attention-L1024-S1024-D256-rope-causal-dropout0.1-lengths-alibi-bias-mask": 48,
    "attention-L1024-S1024-D512-lengths-dropout0.1-N_kv2": 56,
}


@pytest.mark.parametrize(("call", "gpu"), ROWS)
def test_nothing_is_spilled(found, call, gpu):
    allowed = SPILLS.get(call, 0) if triton_table.version() == "3.7.1" else 64  # for which the tiles are chosen
    assert {name: facts["stack"] for name, facts in found[call][gpu].items() if facts["stack"] > allowed} == {}


@pytest.mark.parametrize(("call", "gpu"), [row for row in ROWS if "mask" not in row[0] and "relative" not in row[0]])
def test_loads_are_wide(found, call, gpu):
    """Two bytes are two numbers of a boolean mask; and the products with relative keys are in no order of addresses."""
    assert {name: facts["narrow loads"] for name, facts in found[call][gpu].items() if facts["narrow loads"]} == {}


def test_registers_and_shared_memory_are_the_tables(found):
    """A change of them is to be seen and judged: python tests/triton_table.py --write"""
    table = triton_table.table()
    if table is None:
        pytest.skip(f"triton_table.json has no Triton {triton_table.version()}")
    assert found == table


def test_every_launcher_is_compiled():
    """Of the modules that have a kernel; `linear` is torch's product."""
    modules = triton_table.kernels.MODULES
    launchers = {
        m for m in modules.values() if "launch.run(" in Path(triton_table.kernels.__path__[0], f"{m}.py").read_text()
    }
    assert {modules[call.partition("-")[0]] for call in triton_table.CALLS} == launchers
