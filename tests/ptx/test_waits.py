"""What the persistent kernels execute between a wait for other blocks and the loads after it."""

import json
import re

import pytest
from fusedseq import _load

pytest.importorskip("triton", reason="its cuobjdump is needed")
from tests.ptx import wait_table

pytestmark = pytest.mark.skipif(
    wait_table.GPU not in (_load.build_info()["cuda_codes"] or ()),
    reason="this build has no machine code for sm_90a",
)


@pytest.fixture(scope="module")
def found():
    return wait_table.found()


def test_the_counts_are_as_recorded(found):
    """If this fails: python -m tests.ptx.wait_table shows the differences, --write records them."""
    if wait_table.table() is None:
        pytest.skip(f"no counts are recorded for {_load.build_info()['nvcc']}")
    assert found == wait_table.table()


def test_the_loads_are_as_recorded():
    if wait_table.table(loads=True) is None:
        pytest.skip(f"no loads are recorded for {_load.build_info()['nvcc']}")
    assert wait_table.found_loads() == wait_table.table(loads=True)


def test_rounds_with_weights_in_registers_load_three_steps_at_once():
    """Of the backward in 16 bits: two loads for each of three steps of a product, in the three
    products of the rounds. The product with the gates' weights has no registers for that.
    """
    resident = re.compile(r"backward_kernel<__(nv_bfloat16|half), Variant<1, 2, true, 21, ")
    loads = [v for name, v in wait_table.found_loads().items() if resident.search(name)]
    assert len(loads) == 2
    assert all(values.count(6) == 3 and max(values) == 6 for values in loads)


def test_addresses_are_computed_before_the_wait(found):
    """The narrowest variant in 16 bits has registers for it: each wait is shorter than the shortest
    was before, and most by half. The last round, which also multiplies with the gates' weights, has
    no registers for these weights and zeros.
    """
    before = json.loads(wait_table.TABLE.read_text())["before"]
    narrow = re.compile(r"<__(nv_bfloat16|half), Variant<1, 2, false, 0, 0, false")
    kernels = [name for name in found if narrow.search(name)]
    assert len(kernels) == 4
    for name in kernels:
        waits, shortest = found[name], min(before[name])
        assert 0 < max(waits) < shortest, name
        assert sum(wait < shortest / 2 for wait in waits) > len(waits) / 2, name
