"""Every instruction set that this machine runs gives right results, and the same masks bit for bit.

The library chooses its kernels when it is loaded: so each runs in a process of its own, which is this file.
"""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from fusedseq import _load, fused
from fusedseq.testing import CASES, check, differentiable

ALL = ["baseline", "avx2", "avx512"]


def core():
    """The operators' core against the oracle; prints the instruction set in use and a digest of masks."""
    for case in CASES:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            args, kwargs = case.inputs(dtype=dtype)
            many = sum(t.numel() for t in differentiable(args, kwargs)) > 1000
            for threads in (1, 2, 3) if many else (1,):  # where the work is cut depends on the vectors' width as well
                torch.set_num_threads(threads)
                check(case.op, args, kwargs)
    digest = hashlib.sha256()
    for width in (*range(1, 35), 63, 64, 65, 650, 4097):
        for seed, p in ((0, 0.5), (-7, 0.1), (2**60 + 1, 0.9)):
            digest.update(fused.dropout_mask(seed, p, (3, width)).numpy().tobytes())
            for x in (torch.ones(3, width), torch.ones(3, width, dtype=torch.bfloat16)):
                digest.update((fused.dropout(x, p, seed) != 0).numpy().tobytes())
                digest.update((fused.locked_dropout(x.expand(2, 3, width), p, seed) != 0).numpy().tobytes())
                digest.update((fused.weight_drop(x, p, seed) != 0).numpy().tobytes())
                digest.update((fused.weight_drop(x.T, p, seed, True) != 0).numpy().tobytes())
                digest.update((fused.embedding(torch.arange(width), x.T, p, seed) != 0).numpy().tobytes())
    print(_load.isa("used"), digest.hexdigest())


def run(isa):
    environment = {**os.environ, "FUSEDSEQ_ISA": isa, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)


def found():
    return _load.isa("found").split()


@pytest.mark.parametrize("isa", ALL)
def test_right_on_each_instruction_set(isa, digests):
    if isa not in found():
        pytest.skip(f"this machine has {found()} only")
    result = run(isa)
    assert result.returncode == 0, result.stderr
    used, digests[isa] = result.stdout.split()
    assert used == isa
    assert len(set(digests.values())) == 1, f"masks differ: {digests}"


@pytest.fixture(scope="module")
def digests():
    """The masks of the instruction sets that have run."""
    return {}


def test_the_widest_is_used_by_default():
    assert _load.isa("used") == (os.environ.get("FUSEDSEQ_ISA") or [isa for isa in ALL if isa in found()][-1])


@pytest.mark.parametrize("isa", ["sse9", "AVX2", "avx512 "])
def test_an_unknown_one_is_refused(isa):
    result = run(isa)
    assert result.returncode != 0
    assert "FUSEDSEQ_ISA must be one of" in result.stderr
    assert isa in result.stderr


if __name__ == "__main__":
    core()
