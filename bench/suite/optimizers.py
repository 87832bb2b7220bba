"""Optimizer steps on constant gradients: NT-ASGD with clipping, and torch's equivalent.

The sizes are those of the paper's AWD-LSTM: embedding 400, hidden 1150, 3 layers, 10,000 words,
tied weights; clipping at 0.25, weight decay 1.2e-6. Averaging is on, so every step reads gradient,
parameter and average and writes the latter two.
"""

import torch
from fusedseq.optim import NTASGD
from torch import nn

LR, CLIP, WEIGHT_DECAY = 30.0, 0.25, 1.2e-6
LAYERS = ((400, 1150), (1150, 1150), (1150, 400))
SHAPES = [
    (10_000, 400),
    (10_000,),
    *(s for X, H in LAYERS for s in ((4 * H, X), (4 * H, H), (4 * H,))),
]
PARAMETERS = sum(torch.Size(shape).numel() for shape in SHAPES)


def inputs(randn):
    """Returns the parameters followed by their gradients."""
    return tuple(randn(*shape) for shape in SHAPES * 2), {}


def clone_parameters(tensors):
    """Returns copies of the parameters, whose .grad are copies too, and the gradients."""
    half = len(tensors) // 2
    parameters, gradients = [nn.Parameter(t.clone()) for t in tensors[:half]], tensors[half:]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    return parameters, gradients


def stateful_step(build):
    """Returns a function of `inputs` that makes its optimizer in its first call, and steps."""
    steps = []

    def step(*tensors):
        if not steps:
            steps.append(build(clone_parameters(tensors)[0]))
        return steps[0]()

    return step


def nt_asgd(parameters):
    optimizer = NTASGD(parameters, LR, weight_decay=WEIGHT_DECAY, max_norm=CLIP)
    optimizer.start_averaging()
    return optimizer.step


def torch_asgd(parameters, foreach):
    optimizer = torch.optim.ASGD(
        parameters, LR, lambd=0.0, t0=0, weight_decay=WEIGHT_DECAY, foreach=foreach
    )

    def step():
        nn.utils.clip_grad_norm_(parameters, CLIP, foreach=foreach)
        optimizer.step()

    return step


def check(tensors, steps=3):
    """Asserts that NTASGD and torch's optimizer have the same parameters after some steps.

    Returns the largest difference over the allowed one: 100 times the relative distance of two
    neighbouring numbers in fp32, or two such distances in bf16, of a tensor's largest element.
    """
    allowed = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
    found = []
    for build in (nt_asgd, lambda parameters: torch_asgd(parameters, True)):
        parameters, gradients = clone_parameters(tensors)
        step = build(parameters)
        for _ in range(steps):
            step()
            for p, g in zip(parameters, gradients, strict=True):
                p.grad.copy_(g)  # torch clips the gradients in place
        found.append([p.detach() for p in parameters])
    errors = [
        (a - b).abs().max().float() / (allowed[b.dtype] * b.abs().max())
        for a, b in zip(*found, strict=True)
    ]
    worst = torch.stack(errors).max().item()  # which is NaN if one is
    assert worst <= 1, (
        f"nt_asgd: the difference from torch.optim.ASGD is {worst:.3g} times the allowed one"
    )
    return worst
