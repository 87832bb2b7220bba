"""What the persistent kernels execute between a wait for other blocks and the loads behind it."""

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
    """If this fails: python tests/ptx/wait_table.py shows the differences, --write records them."""
    if wait_table.table() is None:
        pytest.skip(f"no counts are recorded for {_load.build_info()['nvcc']}")
    assert found == wait_table.table()


def test_addresses_are_computed_before_the_wait(found):
    """The narrow variants in 16 bits have registers for it: at most 24 instructions are left, where
    each wait had 32 to 80 before.
    """
    before = json.loads(wait_table.TABLE.read_text())["before"]
    narrow = re.compile(r"<__(nv_bfloat16|half), Variant<[12], [23], false")
    kernels = [name for name in found if narrow.search(name)]
    assert len(kernels) == 8
    for name in kernels:
        assert 0 < max(found[name]) <= 24 < min(before[name]), name
