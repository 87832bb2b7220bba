"""Every instruction set that this machine has gives right results, and the same random masks.

The library selects its kernels when it is loaded, by FUSEDSEQ_ISA. So each instruction set is
tested in a process of its own, which runs this file: it compares the case table with the oracle and
prints a digest of masks. These tests are slow and left to `make test-all`; all other tests run on
the widest instruction set.
"""

import hashlib
import os
import platform
import subprocess
import sys

import pytest
import torch
from fusedseq import _load, fused
from fusedseq.quantization import Int8Weight
from fusedseq.testing import CASES, check, differentiable

# The instruction sets of all architectures, of each architecture the narrowest first.
ALL = ["baseline", "baseline_bf16", "avx2", "avx512", "avx512_bf16", "avx512_amx"]


def main():
    """Compares the case table with the oracle; prints the instruction set and a digest of masks."""
    for case in CASES:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            args, kwargs = case.inputs(dtype=dtype)
            many = sum(t.numel() for t in differentiable(args, kwargs)) > 1000
            # How work is divided among threads depends on the width of the vectors.
            for threads in (1, 3) if many else (1,):
                torch.set_num_threads(threads)
                check(case.op, args, kwargs)
    for M in (1, 2, 3, 8, 9, 150):
        for K in (1, 7, 16, 65, 650):
            x, W = torch.randn(M, K), Int8Weight.from_float(torch.randn(37, K))
            exact = x.double() @ W.dequantize().double().T
            assert (fused.linear(x, W) - exact).abs().max() <= 1e-5 * exact.abs().max()
    digest = hashlib.sha256()
    for width in (*range(1, 35), 63, 64, 65, 650, 4097):
        for seed, p in ((0, 0.5), (-7, 0.1), (2**60 + 1, 0.9)):
            digest.update(fused.dropout_mask(seed, p, (3, width)).numpy().tobytes())
            for x in (torch.ones(3, width), torch.ones(3, width, dtype=torch.bfloat16)):
                digest.update((fused.dropout(x, p, seed) != 0).numpy().tobytes())
                digest.update(
                    (fused.locked_dropout(x.expand(2, 3, width), p, seed) != 0).numpy().tobytes()
                )
                digest.update((fused.weight_drop(x, p, seed) != 0).numpy().tobytes())
                digest.update((fused.weight_drop(x.T, p, seed, True) != 0).numpy().tobytes())
                digest.update(
                    (fused.embedding(torch.arange(width), x.T, p, seed) != 0).numpy().tobytes()
                )
    print(_load.isa("used"), digest.hexdigest())


def run_in_process(isa):
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "FUSEDSEQ_ISA": isa, "PYTHONPATH": path}
    return subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)


def compiled():
    return _load.isa("compiled").split()


def available():
    return _load.isa("found").split()


def test_every_compiled_instruction_set_is_known_here():
    assert [isa for isa in ALL if isa in compiled()] == compiled()
    assert [isa for isa in ALL if isa in available()] == available()


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.slow  # the whole case table, on up to three threads
def test_right_on_each_instruction_set(isa, digests):
    if isa not in compiled():
        pytest.skip(f"this build, for {platform.machine()}, has {compiled()} only")
    if isa not in available():
        pytest.skip(f"this machine runs {available()} only")
    result = run_in_process(isa)
    assert result.returncode == 0, result.stderr
    used, digests[isa] = result.stdout.split()
    assert used == isa
    assert len(set(digests.values())) == 1, f"masks differ: {digests}"


@pytest.fixture(scope="module")
def digests():
    """{instruction set: digest of its masks}, filled by the tests."""
    return {}


def test_the_widest_is_used_by_default():
    widest = [isa for isa in ALL if isa in available()][-1]
    assert _load.isa("used") == (os.environ.get("FUSEDSEQ_ISA") or widest)


@pytest.mark.parametrize("isa", ["sse9", "AVX2", "avx512 "])
def test_an_unknown_instruction_set_is_rejected(isa):
    result = run_in_process(isa)
    assert result.returncode != 0
    assert "FUSEDSEQ_ISA must be one of" in result.stderr
    assert isa in result.stderr


if __name__ == "__main__":
    main()
