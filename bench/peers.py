"""What else runs on a GPU: torch's attention backends, each forced, FlexAttention, and cuDNN's LSTM on packed weights.

As in baselines.py masks come from torch's own generator. A peer that cannot do a call raises, and is said to be left out.
"""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import baselines

BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}


def forced(backend):
    """torch's operator on this backend alone; it raises where the backend does not take the call."""

    def attention(*args, **kwargs):
        with sdpa_kernel(backend):
            return baselines.attention(*args, **kwargs)

    return attention


class FlexAttention:
    """Causality and padding as a block mask, which is made in the first call and kept, as a model would keep it."""

    def __init__(self):
        self.flex, self.mask = None, None

    def __call__(self, q, k, v, *, causal=False, key_lengths=None, scale=None, **others):
        baselines.without(**{name: value for name, value in others.items() if value and name != "seed"})
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
        seen = lambda b, h, i, j: j < key_lengths[b]  # noqa: E731
    elif key_lengths is None:
        seen = lambda b, h, i, j: j <= i  # noqa: E731
    else:
        seen = lambda b, h, i, j: (j <= i) & (j < key_lengths[b])  # noqa: E731
    B = None if key_lengths is None else q.size(0)
    return create_block_mask(seen, B, None, q.size(2), k.size(2), device=q.device)


def attention():
    """{name: function}, with baselines.attention's arguments."""
    return {**{name: forced(backend) for name, backend in BACKENDS.items()}, "flex": FlexAttention()}


class PackedLSTM:
    """cuDNN's LSTM on weights that lie in one chunk, as it likes them best, and so without the weight drop: a bound for
    whoever masks first. Its numbers are torch.nn.LSTM's; the gradients are handed to the caller's weights."""

    def __init__(self):
        self.packed = None

    def __call__(self, x, W_ih, W_hh, b, h0, c0, **_):
        if self.packed is None:
            module = nn.LSTM(x.size(2), h0.size(1)).to(x)
            module.flatten_parameters()
            self.packed = [p.detach() for p in module.parameters()]
        *packed, b_hh = self.packed
        weights = [Stand.apply(given, one) for given, one in zip((W_ih, W_hh, b), packed, strict=True)]
        y, h, c = torch._VF.lstm(x, (h0[None], c0[None]), [*weights, b_hh], True, 1, 0.0, True, False, False)
        return y, (h[0], c[0])


class Stand(torch.autograd.Function):
    """`packed` in the place of `given`, which gets its gradient."""

    @staticmethod
    def forward(ctx, given, packed):
        return packed.view_as(packed)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
