"""What the GPU cases are compared with beside the baselines.

These are torch's attention backends, each forced, FlexAttention, and cuDNN's LSTM on packed
weights. As in the baselines, masks come from torch's own generator. A peer that cannot do a call
raises; the result then records it as left out.
"""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.suite import baselines
from bench.suite.baselines.unsupported import reject_options

BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}


def force_backend(backend):
    """Returns torch's attention on this backend alone, which raises if it cannot do a call."""

    def attention(*args, **kwargs):
        with sdpa_kernel(backend):
            return baselines.attention(*args, **kwargs)

    return attention


class FlexAttention:
    """FlexAttention with causality and padding as a block mask.

    The block mask is computed in the first call and cached, as a model would cache it.
    """

    def __init__(self):
        self.flex, self.mask = None, None

    def __call__(self, q, k, v, *, causal=False, key_lengths=None, scale=None, **others):
        reject_options(
            **{name: value for name, value in others.items() if value and name != "seed"}
        )
        if self.flex is None:
            from torch.nn.attention.flex_attention import flex_attention

            self.flex = torch.compile(flex_attention, dynamic=False)
            self.mask = block_mask(q, k, causal, key_lengths)
        return self.flex(q, k, v, block_mask=self.mask, scale=scale)


def block_mask(q, k, causal, key_lengths):
    from torch.nn.attention.flex_attention import create_block_mask

    if not causal and key_lengths is None:
        return None
    if not causal:
        visible = lambda b, h, i, j: j < key_lengths[b]  # noqa: E731
    elif key_lengths is None:
        visible = lambda b, h, i, j: j <= i  # noqa: E731
    else:
        visible = lambda b, h, i, j: (j <= i) & (j < key_lengths[b])  # noqa: E731
    B = None if key_lengths is None else q.size(0)
    return create_block_mask(visible, B, None, q.size(2), k.size(2), device=q.device)


def attention():
    """Returns {name: function}; the functions have the arguments of baselines.attention."""
    forced = {name: force_backend(backend) for name, backend in BACKENDS.items()}
    return {**forced, "flex": FlexAttention()}


class PackedLSTM:
    """cuDNN's LSTM on weights that are packed in one allocation, hence without weight drop.

    It is a bound for every implementation that masks the weights first, because a masked weight has
    to be packed in each call. The packed weights are torch.nn.LSTM's initial ones; their gradients
    are passed to the caller's weights, so that backward does the same work.
    """

    def __init__(self):
        self.packed = None

    def __call__(self, x, W_ih, W_hh, b, h0, c0, **_):
        if self.packed is None:
            module = nn.LSTM(x.size(2), h0.size(1)).to(x)
            module.flatten_parameters()
            self.packed = [p.detach() for p in module.parameters()]
        *packed, b_hh = self.packed
        weights = [
            PassGradient.apply(weight, replacement)
            for weight, replacement in zip((W_ih, W_hh, b), packed, strict=True)
        ]
        y, h, c = torch._VF.lstm(
            x, (h0[None], c0[None]), [*weights, b_hh], True, 1, 0.0, True, False, False
        )
        return y, (h[0], c[0])


class PassGradient(torch.autograd.Function):
    """Returns `replacement` and passes its gradient to `weight`."""

    @staticmethod
    def forward(ctx, weight, replacement):
        return replacement.view_as(replacement)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None
