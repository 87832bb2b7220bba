"""Argument checks of `attention` beyond those that every operator has: its options, positions and
table of rows.
"""

import pytest
import torch
from fusedseq import fused

from tests.support.good_calls import B, call


@pytest.mark.parametrize("offset", [2**63 - 1, 2**62 + 1, -(2**62) - 1, 2**70])
def test_offset_whose_positions_exceed_64_bits(offset):
    with pytest.raises(
        ValueError, match=rf"^attention: offset must be in \[-2\*\*62, 2\*\*62\], got {offset}"
    ):
        call("attention", offset=offset, rope=None)


@pytest.mark.parametrize("B", [2**62 + 2**16, 2**48])
def test_a_batch_beyond_the_address_space(B):
    """A tensor that repeats one element may have any size, its result may not."""
    q = torch.zeros(1, 1, 1, 1).expand(B, 1, 1, 1)
    with pytest.raises(RuntimeError):
        fused.attention(q, q, q)


@pytest.mark.parametrize("name", ["alibi", "rope", "mask", "key_lengths", "key_rows"])
def test_option_tensors_of_attention(name):
    with pytest.raises(
        ValueError, match=rf"^attention: {name} must be on .*the device of q, cpu, got meta"
    ):
        call("attention", **{name: torch.zeros(B, 5, dtype=torch.int64, device="meta")})
    with pytest.raises(TypeError, match=rf"^attention: {name} must be a tensor.*, got list"):
        call("attention", **{name: [1.5, 2.5]})


ATTENTION_OPTIONS = [
    # argument, value, the exception, its message
    (
        "alibi",
        torch.zeros(2).double(),
        TypeError,
        "float32 or of the dtype of q, torch.float32, got torch.float64",
    ),
    (
        "rope",
        torch.zeros(9, 6).half(),
        TypeError,
        "float32 or of the dtype of q, torch.float32, got torch.float16",
    ),
    (
        "mask",
        torch.zeros(4, 5),
        TypeError,
        "bool, True where a key is visible, got torch.float32; a float mask is a bias",
    ),
    (
        "mask",
        torch.ones(4, 4) > 0,
        ValueError,
        r"broadcastable to \(B, N, L, S\) = \(2, 2, 4, 5\), got \(4, 4\)",
    ),
    ("key_lengths", torch.tensor([3, 6]), ValueError, r"in \[0, S\] = \[0, 5\], got 6"),
    ("key_lengths", torch.tensor([-1, 3]), ValueError, r"in \[0, S\] = \[0, 5\], got -1"),
    ("key_lengths", torch.tensor([3]), ValueError, r"\(B,\) = \(2,\), got \(1,\)"),
    ("key_lengths", torch.tensor([3.0, 4.0]), TypeError, "int64 or int32, got torch.float32"),
    ("key_lengths", [3, 6], ValueError, r"in \[0, S\] = \[0, 5\], got 6"),
    ("key_lengths", (3, True), TypeError, r"a tensor or a list of ints, got tuple with \['bool'\]"),
    ("key_lengths", 3, TypeError, "a tensor or a list of ints, got int"),
    ("offset", 1.5, TypeError, "a whole number, got float"),
    ("offset", True, TypeError, "a whole number, got bool"),
    ("scale", "large", TypeError, "a number, got str"),
    ("scale", torch.tensor(1.0), TypeError, "a number, got Tensor"),
    ("causal", 1, TypeError, "True or False, got 1"),
    ("rope_interleaved", None, TypeError, "True or False, got None"),
    ("key_rows", torch.zeros(2, dtype=torch.int64), ValueError, r"\(B, S\), got \(2,\)"),
    (
        "key_rows",
        torch.zeros(3, 5, dtype=torch.int64),
        ValueError,
        r"\(B, S\) with B = 2 and S in \[1, 5\], got \(3, 5\)",
    ),
    (
        "key_rows",
        torch.zeros(2, 6, dtype=torch.int64),
        ValueError,
        r"\(B, S\) with B = 2 and S in \[1, 5\], got \(2, 6\)",
    ),
    ("key_rows", torch.full((2, 5), 2), ValueError, r"in \[0, 2\), the rows of k, got 2"),
    ("key_rows", torch.full((2, 5), -1), ValueError, r"in \[0, 2\), the rows of k, got -1"),
    ("key_rows", torch.zeros(2, 5), TypeError, "int64 or int32, got torch.float32"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    ATTENTION_OPTIONS,
    ids=[f"{a[0]}-{a[3]}" for a in ATTENTION_OPTIONS],
)
def test_wrong_option_of_attention(name, value, error, message):
    with pytest.raises(error, match=rf"^attention: {name} must be {message}"):
        call("attention", **{name: value})


def test_negative_offset_of_attention():
    """Without rope, queries may have positions before that of the first key."""
    call("attention", offset=-1, rope=None)
    with pytest.raises(
        ValueError,
        match=r"^attention: rope must be .*, and offset at least 0, got \(73, 6\) and offset -1",
    ):
        call("attention", offset=-1)


def test_another_batch_size_of_k():
    with pytest.raises(
        ValueError,
        match=r"^attention: k must be \(B, N_kv, S, D\) = \(2, 2, 5, 6\), got \(3, 2, 5, 6\)",
    ):
        call("attention", k=torch.zeros(3, 2, 5, 6), v=torch.zeros(3, 2, 5, 6))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "relative_keys"])
def test_key_rows_are_rejected_with_gradients(name):
    rows = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(
        RuntimeError, match=r"^attention: key_rows is for inference and must come without gradients"
    ):
        call("attention", key_rows=rows, **{name: lambda t: t.requires_grad_()})
    with torch.no_grad():
        call("attention", key_rows=rows, **{name: lambda t: t.requires_grad_()})
