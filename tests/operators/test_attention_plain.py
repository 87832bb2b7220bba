"""attention_plain: calls of `attention` on the CPU without options."""

import pytest
import torch
from fusedseq import fused, reference
from fusedseq.fused import autograd

from tests.support.recorder import Recorder

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        autograd.recorder is None, reason="fusedseq._autograd is for another torch or Python"
    ),
]
# Sizes (B, N, N_kv, L, S, D), among them those of each kernel and no rows.
SIZES = [
    (1, 1, 1, 1, 1, 4),
    (1, 8, 8, 1, 200, 64),
    (3, 4, 2, 5, 5, 10),
    (0, 2, 2, 3, 4, 6),
    (2, 2, 2, 70, 90, 33),
]


def tensors(B, N, N_kv, L, S, D, dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    return [
        torch.randn(B, heads, rows, D, generator=g).to(dtype)
        for heads, rows in ((N, L), (N_kv, S), (N_kv, S))
    ]


def called(q, k, v, **options):
    """The result of a call, and the registered operators that it called."""
    with Recorder() as seen:
        y = fused.attention(q, k, v, **options)
    return y, seen.names()


@pytest.mark.parametrize("type_", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_the_bits_are_those_of_the_operator_with_options(sizes, type_, scale):
    q, k, v = tensors(*sizes, type_)
    y, names = called(q, k, v, scale=scale)
    assert names == ["attention_plain_inference"]
    # No key is past so wide a window.
    wanted, names = called(q, k, v, scale=scale, window=(sizes[4], sizes[4]))
    assert names == ["attention"]
    assert torch.equal(y, wanted)
    assert y.stride() == wanted.stride()


def test_strided_heads():
    whole = torch.randn(2, 5, 3, 4, 8)
    q, k, v = (t.transpose(1, 2) for t in whole.unbind(2))
    y, names = called(q, k, v)
    assert names == ["attention_plain_inference"]
    assert torch.equal(y, fused.attention(*(t.contiguous() for t in (q, k, v))))


def test_gradients_have_the_bits_of_the_operator_with_options():
    sizes = (3, 4, 2, 5, 7, 10)
    upstream = torch.randn(3, 4, 5, 10)
    for few in ([0], [1], [2], [1, 2], [0, 1, 2]):
        found = []
        for options in ({}, {"window": (7, 7)}):  # past which there is no key
            given = tensors(*sizes)
            for i in few:
                given[i].requires_grad_()
            with Recorder() as seen:
                y = fused.attention(*given, **options)
                found.append(torch.autograd.grad(y, [given[i] for i in few], upstream))
            op = "attention" if options else "attention_plain"
            assert seen.names() == [op, f"{op}_backward"]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_of_one_projection_are_laid_out_together():
    y = torch.randn(2, 5, 3, 4, 8, requires_grad=True)
    out = fused.attention(*y.permute(2, 0, 3, 1, 4).unbind(0))
    wanted = reference.attention(*y.permute(2, 0, 3, 1, 4).unbind(0))
    upstream = torch.randn(out.shape)
    found = [torch.autograd.grad(t, y, upstream)[0] for t in (out, wanted)]
    torch.testing.assert_close(*found)


def test_higher_derivatives():
    given = [t.double().requires_grad_() for t in tensors(1, 2, 1, 3, 4, 2)]
    assert torch.autograd.gradcheck(fused.attention, given)
    assert torch.autograd.gradgradcheck(fused.attention, given)


def test_a_tangent_and_a_transform_are_not_lost():
    q, k, v = tensors(2, 2, 2, 3, 4, 6)
    tangent = torch.ones_like(k)

    def of_k(k):
        return fused.attention(q, k, v)

    def of_oracle(k):
        return reference.attention(q, k, v)

    wanted, of_tangent = torch.func.jvp(of_oracle, (k,), (tangent * k,))
    with torch.autograd.forward_ad.dual_level():
        y = of_k(torch.autograd.forward_ad.make_dual(k, tangent * k))
        found = torch.autograd.forward_ad.unpack_dual(y)
    torch.testing.assert_close((found.primal, found.tangent), (wanted, of_tangent))
    grad = torch.func.grad(lambda k: of_k(k).square().sum())(k)
    torch.testing.assert_close(grad, torch.func.grad(lambda k: of_oracle(k).square().sum())(k))
    keys = torch.stack([k, 2 * k])
    torch.testing.assert_close(torch.func.vmap(of_k)(keys), torch.vmap(of_oracle)(keys))


def test_a_call_under_autocast_is_cast():
    q, k, v = tensors(2, 2, 2, 3, 4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, names = called(q, k, v)
    assert y.dtype == torch.bfloat16
    assert names == ["attention"]  # Python casts


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_opcheck(sizes):
    given = [t.requires_grad_() for t in tensors(*sizes)]
    torch.library.opcheck(torch.ops.fusedseq.attention_plain, (*given, 0.5))
    torch.library.opcheck(
        torch.ops.fusedseq.attention_plain_inference,
        (*tensors(*sizes), 0.5),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_it_checks_its_arguments():
    q, k, v = tensors(2, 2, 2, 3, 4, 6)
    for op in (torch.ops.fusedseq.attention_plain, torch.ops.fusedseq.attention_plain_inference):
        with pytest.raises(RuntimeError, match=r"attention_plain: k must be \(B, N_kv, S, D\)"):
            op(q, k[:1], v, 0.5)
        with pytest.raises(RuntimeError, match=r"attention_plain: v must be"):
            op(q, k, v[:, :, 1:], 0.5)
    backward = torch.ops.fusedseq.attention_plain_backward
    with pytest.raises(RuntimeError, match=r"attention_plain_backward: lse must be"):
        backward(q, torch.zeros(2, 2, 4), q, k, v, 0.5, 7)
