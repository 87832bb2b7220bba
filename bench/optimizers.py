"""Steps of optimisers on parameters and gradients that stay: NT-ASGD with clipping, and torch's own way to the same.

The paper's AWD-LSTM: embedding 400, hidden 1150, 3 layers, 10,000 words, tied; clip .25, weight decay 1.2e-6. Averaging is
on, so each step reads gradient, parameter and average and writes the latter two.
"""

import torch
from fusedseq.optim import NTASGD
from torch import nn

LR, CLIP, WEIGHT_DECAY = 30.0, 0.25, 1.2e-6
LAYERS = ((400, 1150), (1150, 1150), (1150, 400))
SHAPES = [(10_000, 400), (10_000,), *(s for X, H in LAYERS for s in ((4 * H, X), (4 * H, H), (4 * H,)))]
PARAMETERS = sum(torch.Size(shape).numel() for shape in SHAPES)


def inputs(randn):
    """Parameters, then their gradients."""
    return tuple(randn(*shape) for shape in SHAPES * 2), {}


def kept(build):
    """A function of `inputs` that makes its optimiser, of copies, in its first call, and a step in each."""
    steps = []

    def step(*tensors):
        if not steps:
            half = len(tensors) // 2
            parameters = [nn.Parameter(t.clone()) for t in tensors[:half]]
            for p, g in zip(parameters, tensors[half:], strict=True):
                p.grad = g.clone()
            steps.append(build(parameters))
        return steps[0]()

    return step


def nt_asgd(parameters):
    optimizer = NTASGD(parameters, LR, weight_decay=WEIGHT_DECAY, max_norm=CLIP)
    optimizer.start_averaging()
    return optimizer.step


def torch_asgd(parameters, foreach):
    optimizer = torch.optim.ASGD(parameters, LR, lambd=0.0, t0=0, weight_decay=WEIGHT_DECAY, foreach=foreach)

    def step():
        nn.utils.clip_grad_norm_(parameters, CLIP, foreach=foreach)
        optimizer.step()

    return step


def check(tensors, steps=3):
    """Asserts that some steps lead where torch's do; the largest difference over the one allowed, 1e-5 of a tensor's scale.

    The comparison gets the gradients anew in each step, for torch clips them in place.
    """
    found = []
    for build in (nt_asgd, lambda parameters: torch_asgd(parameters, True)):
        half = len(tensors) // 2
        parameters = [nn.Parameter(t.clone()) for t in tensors[:half]]
        for p, g in zip(parameters, tensors[half:], strict=True):
            p.grad = g.clone()
        step = build(parameters)
        for _ in range(steps):
            step()
            for p, g in zip(parameters, tensors[half:], strict=True):
                p.grad.copy_(g)
        found.append([p.detach() for p in parameters])
    worst = max(((a - b).abs().max() / (1e-5 * b.abs().max())).item() for a, b in zip(*found, strict=True))
    assert worst <= 1, f"nt_asgd: {worst:.3g} of the difference from torch.optim.ASGD that is allowed"
    return worst
