"""Every operator with Triton kernels as the PTX that Triton compiles: results and gradients against
the oracle, within the budget of fusedseq.testing.check.

For sm_80 all kernels, options and tiles, in small sizes. For sm_90 those whose PTX has no wgmma.
"""

import importlib
import itertools
import os
import platform
import shutil
import warnings

import pytest
import torch
from fusedseq import kernels
from fusedseq.fused import check as fused_check
from fusedseq.testing import check

from tests.simt import build as simt

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.sampled_files("PTX", 5),
    pytest.mark.skipif(
        platform.machine() != "x86_64"
        or not shutil.which(simt.CXX)
        or "TRITON_INTERPRET" in os.environ,
        reason="tests/simt needs g++ on x86-64; Triton's interpreter compiles nothing",
    ),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("own", [FP32, BF16, FP16], ids=str)


@pytest.fixture
def on_cpu_tensors(monkeypatch):
    """Makes Triton's launchers the operators' kernels of the CPU, in CUDA's dtypes."""
    for dtypes in (fused_check.DTYPES, fused_check.TRITON):
        monkeypatch.setitem(dtypes, "cpu", (*dtypes["cpu"], FP16))
    library = torch.library.Library("fusedseq", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns that C++ kernels are replaced
        for op in kernels.MODULES:
            library.impl(op, kernels._launcher(op), "CPU")
    yield
    library._destroy()


@pytest.fixture
def sm_80(on_cpu_tensors):
    from tests.ptx import triton_kernels

    with triton_kernels.simulated() as names:
        yield names


@pytest.fixture
def sm_90(on_cpu_tensors):
    from tests.ptx import triton_kernels

    with triton_kernels.simulated(90) as names:
        yield names


def loss(own, seed=1):
    torch.manual_seed(seed)
    x, W, b = torch.randn(21, 24).to(own), torch.randn(70, 24).to(own), torch.randn(70).to(own)
    target = torch.randint(0, 70, (21,))
    target[3] = -100
    return x, W, target, b


@DTYPES
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}], ids=str)
def test_linear_cross_entropy(sm_80, own, options):
    check("linear_cross_entropy", loss(own), options)
    assert set(sm_80) == {"cross_entropy_rows"}


@DTYPES
@pytest.mark.parametrize("D", [40, 4500])
def test_residual_layer_norm(sm_80, own, D):
    """Rows of 4500 elements are read in parts."""
    torch.manual_seed(D)
    rows = 6 if D < 1000 else 3
    args = (*(torch.randn(rows, D).to(own) for _ in range(2)), *torch.randn(2, D).to(own))
    check("residual_layer_norm", args, {"p": 0.3, "seed": 7})
    long = "long_" * (D > 1000)
    assert set(sm_80) == {f"{long}forward_kernel", f"{long}backward_kernel"}


@DTYPES
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "tanh"])
def test_bias_activation_dropout(sm_80, own, activation):
    torch.manual_seed(2)
    args = torch.randn(9, 70).to(own), torch.randn(70).to(own), activation, 0.3, 7
    check("bias_activation_dropout", args, {})
    assert set(sm_80) == {"forward_kernel", "backward_kernel"}


# ---- attention

B, N = 2, 2
DROPOUT = {"dropout": 0.3, "seed": 7}
FAMILIES = {  # L, S, D, dtype
    "packed": (5, 6, 10, BF16),
    "row": (20, 33, 20, BF16),
    "tiled": (40, 131, 10, BF16),
    "tiled in fp32": (33, 40, 10, FP32),  # mma of TF32 numbers, three for a product
}
SETS = {
    "causal, lengths, dropout, bias": lambda L, S, D: {
        "causal": True,
        "key_lengths": torch.tensor([S // 2, S]),
        **DROPOUT,
        "bias": torch.randn(1, N, L, S),
    },
    "mask, alibi, rope": lambda L, S, D: {
        "mask": torch.rand(B, 1, L, S) > 0.3,
        "alibi": torch.tensor([0.5, 0.1]),
        "rope": torch.randn(S, D),
    },
    "relative keys, causal, dropout": lambda L, S, D: {
        "relative_keys": torch.randn(7, D),
        "causal": True,
        **DROPOUT,
    },
}

# Options that the tiled kernels alone compute.
OF_TILED = {"window": (20, 9), "softcap": 2.0, "sinks": torch.tensor([0.7, -0.4]), **DROPOUT}


def call(L, S, D, own, options):
    torch.manual_seed(L + S + D)
    args = torch.randn(B, N, L, D), torch.randn(B, N, S, D), torch.randn(B, N, S, D)
    kwargs = SETS[options](L, S, D)
    real = {k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    kwargs |= {k: kwargs[k].to(own) for k in real}
    return tuple(x.to(own) for x in args), kwargs


def of_family(names, family, options):
    tiled = {f"tiled_{part}" for part in ("forward", "delta", "backward_keys", "backward_queries")}
    bias = {"tiled_backward_bias"} if "bias" in options else set()
    first = family.split()[0]
    wanted = tiled | bias if first == "tiled" else {f"{first}_forward", f"{first}_backward"}
    assert set(names) == wanted


@pytest.mark.parametrize("options", SETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention(sm_80, family, options):
    check("attention", *call(*FAMILIES[family], options))
    of_family(sm_80, family, options)


def test_windows_softcap_and_sinks(sm_80):
    args, _ = call(*FAMILIES["tiled"], "mask, alibi, rope")
    check("attention", args, OF_TILED | {"sinks": OF_TILED["sinks"].to(BF16)})
    of_family(sm_80, "tiled", "")


def test_packed_sequences(sm_80):
    torch.manual_seed(5)
    cu_seqlens = torch.tensor([0, 5, 45, 46, 86])
    args = (*(torch.randn(86, N, 10).to(BF16) for _ in range(3)), cu_seqlens, cu_seqlens)
    check("attention_varlen", args, {"causal": True, "window": (16, 0)})
    of_family(sm_80, "tiled", "")


@pytest.mark.parametrize("D", [130, 300])
@pytest.mark.parametrize(
    ("first", "size"), [("packed", (5, 6)), pytest.param("tiled", (20, 33), marks=pytest.mark.slow)]
)
def test_wide_heads(sm_80, first, size, D):
    """Heads wider than 64 are processed in chunks."""
    check("attention", *call(*size, D, BF16, "mask, alibi, rope"))
    of_family(sm_80, first, "")


@pytest.mark.parametrize("own", [BF16, FP16], ids=str)
@pytest.mark.parametrize("family", ["packed", "row"])
def test_a_mask_with_dropout(sm_80, family, own):
    """Triton takes half of the elements of these products twice where nothing hides the mask: see
    `operand` in kernels/attention/tile.py."""
    L, S, D, _ = FAMILIES[family]
    args, kwargs = call(L, S, D, own, "mask, alibi, rope")
    check("attention", args, {"mask": kwargs["mask"], **DROPOUT})
    of_family(sm_80, family, "")


@pytest.mark.parametrize("family", ["packed", "row", "tiled"])
def test_attention_in_fp16(sm_80, family):
    """With every option of SETS that does not exclude another."""
    L, S, D, _ = FAMILIES[family]
    args, kwargs = call(L, S, D, FP16, "causal, lengths, dropout, bias")
    kwargs |= call(L, S, D, FP16, "mask, alibi, rope")[1]
    check("attention", args, kwargs)
    of_family(sm_80, family, "bias")


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_share_keys(sm_80, family):
    L, S, D, own = FAMILIES[family]
    (q, k, v), kwargs = call(L, S, D, own, "causal, lengths, dropout, bias")
    check("attention", (q, k[:, :1], v[:, :1]), kwargs)
    of_family(sm_80, family, "bias")


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_several_rows(sm_80, family):
    """As in a beam search, where hypotheses share the keys of their common beginning."""
    L, S, D, own = FAMILIES[family]
    args, kwargs = call(L, S, D, own, "mask, alibi, rope")
    kwargs["key_rows"] = torch.randint(0, B, (B, S))
    check("attention", args, kwargs, backward=False)
    assert set(sm_80) == {f"{family.split()[0]}_forward"}


# The options that decide which tiles a call has, in the order of kernels/attention/plan.py.
PRESSURES = {
    "plain": lambda L, S: {"causal": True},
    "dropout": lambda L, S: {"causal": True, **DROPOUT},
    "rich": lambda L, S: {
        "bias": torch.randn(1, 1, L, S),
        "mask": torch.rand(1, 1, L, S) > 0.3,
        **DROPOUT,
    },
}


def configurations():
    """Returns a call (L, S, D, dtype, pressure) for each choice of tiles that plan.py makes."""
    plan = importlib.import_module("fusedseq.kernels.attention.plan")
    sizes = [(L, S) for L in (12, 20, 40) for S in (10, 20, 40, 100, 140)]
    found = {}
    for own, (L, S), D in itertools.product((BF16, FP32), sizes, (10, 20, 64)):
        for number, pressure in enumerate(PRESSURES):
            chosen = plan.plan(L, S, D, own.itemsize, number)
            tiles = own, chosen.forward, chosen.backward, chosen.queries
            found.setdefault(str(tiles), (L, S, D, own, pressure))
    # Longer sequences for tiles of up to 128 queries and 128 keys, and parts of such tiles.
    wide = [(130, 140, D, BF16, pressure) for D in (64, 128, 256) for pressure in PRESSURES]
    return [*found.values(), *wide]


def in_sample(number, D):
    """Whether a call is not marked slow: one in six, and the long ones with heads of 128."""
    return number % 6 == 0 or D == 128


@pytest.mark.parametrize(
    ("L", "S", "D", "own", "pressure"),
    [
        pytest.param(
            *sizes,
            marks=[] if in_sample(i, sizes[2]) else pytest.mark.slow,
            id="-".join(map(str, sizes)),
        )
        for i, sizes in enumerate(configurations())
    ],
)
def test_all_tiles_of_attention(sm_80, L, S, D, own, pressure):
    torch.manual_seed(D)
    heads = (2, 2) if S <= 16 else (1, 1)  # packed kernels compute several pairs at once
    q, k, v = (torch.randn(*heads, n, D).to(own) for n in (L, S, S))
    kwargs = PRESSURES[pressure](L, S)
    if "bias" in kwargs:
        kwargs["bias"] = kwargs["bias"].to(own)
    check("attention", (q, k, v), kwargs)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("options", ["causal", "dropout", "bias"])
@pytest.mark.parametrize("D", [64, 128])
def test_tiles_of_compute_capability_90(sm_80, monkeypatch, D, options):
    """The tiles that a GPU of compute capability 9.0 has of its own, in the code for 8.0: its
    products (wgmma) are not simulated."""
    from fusedseq.kernels import launch

    monkeypatch.setattr(launch, "capability", lambda kernel, x: 90)
    torch.manual_seed(D)
    q, k, v = (torch.randn(1, 1, n, D).to(BF16) for n in (130, 140, 140))
    kwargs = {
        "causal": {"causal": True},
        "dropout": DROPOUT,
        "bias": {"bias": torch.randn(1, 1, 130, 140).to(BF16)},
    }[options]
    check("attention", (q, k, v), kwargs)


def test_keys_in_parts(sm_80):
    args, kwargs = call(3, 600, 10, BF16, "mask, alibi, rope")
    check("attention", args, kwargs, backward=False)
    assert set(sm_80) == {"split_forward", "split_combine"}


# ---- sm_90: stmatrix, mma and cp.async


@pytest.mark.parametrize("options", SETS)
@pytest.mark.parametrize(
    "family", ["packed", pytest.param("tiled in fp32", marks=pytest.mark.slow)]
)
def test_attention_on_sm_90(sm_90, family, options):
    check("attention", *call(*FAMILIES[family], options))
    of_family(sm_90, family, options)


def test_keys_in_parts_on_sm_90(sm_90):
    args, kwargs = call(3, 600, 10, BF16, "mask, alibi, rope")
    check("attention", args, kwargs, backward=False)
    assert set(sm_90) == {"split_forward", "split_combine"}


@DTYPES
def test_loss_and_sublayers_on_sm_90(sm_90, own):
    check("linear_cross_entropy", loss(own), {})
    x, residual = (torch.randn(6, 40).to(own) for _ in range(2))
    weight, bias = torch.randn(2, 40).to(own)
    check("residual_layer_norm", (x, residual, weight, bias), {"p": 0.3, "seed": 7})
    check("bias_activation_dropout", (x, bias, "gelu", 0.3, 7), {})


def test_wgmma_is_an_error_that_names_it(sm_90):
    """So that the list in README.md of what was left stays true."""
    from tests.ptx.parse import PtxError

    # The fence stands before the first wgmma.
    unknown = r"unknown (instruction: wgmma|fence: fence\.proxy\.async\.shared::cta)"
    with pytest.raises(PtxError, match=unknown):
        check("attention", *call(*FAMILIES["tiled"], "mask, alibi, rope"))
