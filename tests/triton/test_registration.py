"""Triton kernels are imported late, registered with the dispatcher, and named by
`fused.explain`."""

import functools
import subprocess
import sys

import pytest
import torch
from fusedseq import fused, kernels
from torch._subclasses.fake_tensor import FakeTensorMode


def test_import_needs_no_triton():
    script = "import sys; sys.modules['triton'] = None; import fusedseq.fused"
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )


@pytest.mark.parametrize("op", kernels.MODULES)
def test_launcher_is_registered_for_cuda(op):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedseq::{op}", "CUDA")
    pytest.importorskip("triton")
    assert callable(getattr(kernels.module(op), op))


def test_call_without_triton_raises_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("fusedseq.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ImportError, match="dropout_mask: needs Triton on a GPU, found none: pip install triton"
    ):
        kernels.module("dropout_mask")


def test_explain_names_the_kernel():
    pytest.importorskip("triton")
    with FakeTensorMode():
        seed = torch.empty(1, dtype=torch.int64, device="cuda")
        line = fused.explain("dropout_mask", seed, 0.5, (3, 5))
    assert line.startswith("dropout_mask on cuda, float32: kernels/dropout_mask.py; ")


@pytest.mark.parametrize(
    ("L", "D", "family"),
    [(6, 2048, "packed"), (90, 64, "row"), (90, 256, "tiled"), (129, 64, "tiled")],
)
def test_explain_names_the_kernel_of_attention(L, D, family):
    pytest.importorskip("triton")
    with FakeTensorMode():
        q = torch.empty(2, 3, L, D, dtype=torch.bfloat16, device="cuda")
        line = fused.explain("attention", q, q, q, causal=True)
    assert line.startswith(f"attention on cuda, bfloat16: kernels/attention/{family}.py; ")


def test_explain_reports_the_parts_of_the_keys():
    """Keys are split into as many parts as fill a GPU. S is the number of key_rows if there are
    any; many heads need no parts."""
    pytest.importorskip("triton")
    with FakeTensorMode():
        q, k = (torch.empty(2, 3, n, 64, dtype=torch.bfloat16, device="cuda") for n in (1, 1024))
        key_rows = torch.empty(2, 600, dtype=torch.int64, device="cuda")
        many_heads = [t.repeat(1, 100, 1, 1) for t in (q, k, k)]
        explain = functools.partial(fused.explain, "attention", causal=True)
        assert explain(q, k, k).endswith(
            "kernels/attention/split.py; few queries, their keys in 4 parts"
        )
        assert explain(q, k, k, key_rows=key_rows).endswith("their keys in 2 parts")
        assert "attention/tiled" in explain(*many_heads)
