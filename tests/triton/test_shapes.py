"""Direct calls of the Triton launchers with wrong shapes raise an error instead of reading outside
of their tensors, and offsets beyond 32 bits are computed right or refused."""

import pytest
import torch
from fusedseq import kernels

pytest.importorskip("triton")


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(**changed):
    call = {"q": empty(2, 4, 6, 8), "k": empty(2, 2, 7, 8), "v": empty(2, 2, 7, 8), "bias": None}
    call |= {"mask": None, "key_lengths": None, "alibi": None, "relative_keys": None, "rope": None}
    call |= {"rope_interleaved": False, "key_rows": None, "seed": None, "scale": 1.0}
    call |= {"causal": False, "offset": 0, "dropout": 0.0}
    return kernels.module("attention").attention(*(call | changed).values())


def norm(x=(8, 16), residual=(8, 16), weight=(16,), bias=(16,)):
    tensors = [empty(*shape) for shape in (x, residual, weight, bias)]
    return kernels.module("residual_layer_norm").residual_layer_norm(
        *tensors, 0.0, 1e-5, False, None
    )


def activation(b):
    call = kernels.module("bias_activation_dropout").bias_activation_dropout
    return call(empty(5, 6), b, "relu", 0.0, None)


def loss(**changed):
    call = {"x": empty(5, 4), "W": empty(7, 4), "target": empty(5, dtype=torch.int64), "b": None}
    call |= {"class_weights": None, "ignore_index": -1, "label_smoothing": 0.0, "z_loss": 0.0}
    call |= {"temperature": 1.0, "reduction": 1, "needs": 0}
    return kernels.module("linear_cross_entropy").linear_cross_entropy(*(call | changed).values())


WRONG = {
    r"^attention: k must be \(B, N_kv, S, D\) with .* N = 4, got \(2, 3, 7, 8\)": lambda: attention(
        k=empty(2, 3, 7, 8)
    ),
    r"^attention: v must be \(2, 2, 7, 8\), got \(2, 2, 5, 8\)": lambda: attention(
        v=empty(2, 2, 5, 8)
    ),
    r"^attention: alibi must be \(4,\), got \(2,\)": lambda: attention(alibi=empty(2)),
    r"^attention: mask must be \(2, 4, 6, 7\) or 1 in .*, got \(2, 1, 6, 6\)": lambda: attention(
        mask=empty(2, 1, 6, 6, dtype=torch.bool)
    ),
    r"^attention: rope must be \(P, R\) with P at least 9,": lambda: attention(
        rope=empty(8, 8), offset=3
    ),
    r"^attention: offset must be at least 2\^31, or leave": lambda: attention(offset=2**31 - 9),
    r"^residual_layer_norm: residual must be \(8, 16\), got \(4, 16\)": lambda: norm(
        residual=(4, 16)
    ),
    r"^residual_layer_norm: bias must be \(16,\), got \(8,\)": lambda: norm(bias=(8,)),
    r"^bias_activation_dropout: b must be \(6,\), got \(5,\)": lambda: activation(empty(5)),
    r"^linear_cross_entropy: target must be \(5,\), got \(4,\)": lambda: loss(
        target=empty(4, dtype=torch.int64)
    ),
    r"^linear_cross_entropy: b must be \(7,\), got \(6,\)": lambda: loss(b=empty(6)),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_shape_is_refused(message):
    with pytest.raises(RuntimeError, match=message):
        WRONG[message]()


def test_masks_with_large_strides_are_copied():
    from fusedseq.kernels.attention.checks import within_reach

    usual = torch.empty_strided((1, 1, 2, 3), (6, 6, 1, 2), dtype=torch.bool, device="meta")
    assert within_reach(usual) is usual
    far = torch.empty_strided((1, 1, 2, 3), (6, 6, 1, 2**30), dtype=torch.bool, device="meta")
    assert within_reach(far).stride() == (6, 6, 3, 1)
    assert within_reach(None) is None


@pytest.mark.parametrize("terms", [1, 100, 4_200_000, 2**31 - 1])
def test_parts_of_the_gradient_of_a_bias_are_counted_in_32_bits(terms):
    from fusedseq.kernels.attention.backward import PROGRAMS, parts_of_bias

    parts = parts_of_bias(1, terms)
    assert 1 <= parts <= PROGRAMS
    assert terms * parts < 2**31
