"""`lstm` by cuDNN's persistent kernel, where torch lets cuDNN take it. Not a kernel of the registered operator: how much
cuDNN saves for backward it alone knows, so that a compiler could not be told the operator's shapes."""

import torch

from fusedseq.fused import autograd

LSTM_MODE = 2  # CUDNN_LSTM


def in_box(dtype, capability, B, X, H):
    """Whether torch picks cuDNN's persistent kernel for one layer and direction (ATen/native/cudnn/RNN.cpp): it depends
    on nothing but these. capability: the device's, e.g. (9, 0); below 8 not looked at"""
    major, minor = capability
    return (
        dtype == torch.float16 and major >= 8 and minor != 6
        and 0 < H <= 1024 and H % 128 == 0 and X % 128 == 0 and 0 < B <= 128 and B % 8 == 0
    )  # fmt: skip


def takes(x, W_ih, W_hh, b, h0, c0, lengths, weight_drop):
    """Whether a call of `lstm` is cuDNN's: what it has no argument for is not, nor is what torch.compile or a transform
    of torch.func sees."""
    if not x.is_cuda or lengths is not None or weight_drop or not torch.backends.cudnn.is_acceptable(x):
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    dense = all(t is None or t.is_contiguous() for t in (x, W_ih, W_hh, b, h0, c0))
    _, B, X = x.shape
    return dense and in_box(x.dtype, torch.cuda.get_device_capability(x.device), B, X, h0.size(1))


class CudnnLstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, oracle, x, W_ih, W_hh, b, h0, c0):
        weights = [W_ih, W_hh] if b is None else [W_ih, W_hh, b, torch.zeros_like(b)]
        # hidden size, projection, layers, batch first, dropout, training, bidirectional, batch sizes, dropout's state
        ctx.sizes = LSTM_MODE, h0.size(1), 0, 1, False, 0.0, any(ctx.needs_input_grad), False, [], None
        with torch.autocast("cuda", enabled=False):  # the operands are in its dtype; it would flatten the weights anew
            y, h, c, reserve, packed = torch.ops.aten._cudnn_rnn(
                x, weights, len(weights), None, h0[None], c0[None], *ctx.sizes
            )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, W_ih, W_hh, b, h0, c0, y, reserve, packed)
        ctx.oracle = oracle
        return y, h[0], c[0]

    @staticmethod
    def backward(ctx, dy, dh, dc):
        *inputs, y, reserve, packed = ctx.saved_tensors
        x, W_ih, W_hh, b, h0, c0 = inputs
        needs = ctx.needs_input_grad[1:]
        if dy is None and dh is None and dc is None:
            return (None,) * 7
        if torch.is_grad_enabled():
            return None, *autograd.through_oracle(ctx.oracle, inputs, needs, (dy, dh, dc))
        weights = [W_ih, W_hh] if b is None else [W_ih, W_hh, b, torch.zeros_like(b)]
        dh, dc = (None if d is None else d[None] for d in (dh, dc))
        # A clone, for cuDNN writes into what it has saved, and there may be a second backward.
        dx, dh0, dc0, dW = torch.ops.aten._cudnn_rnn_backward(
            x, weights, len(weights), packed, h0[None], c0[None], y, dy, dh, dc, *ctx.sizes, reserve.clone(),
            [needs[0], needs[4], needs[5], any(needs[1:4])],
        )  # fmt: skip
        states = (None if d is None else d[0] for d in (dh0, dc0))
        grads = dx, *(dW[:3] if len(dW) > 2 else (*(dW or (None, None)), None)), *states
        return None, *(g if need else None for g, need in zip(grads, needs, strict=True))
