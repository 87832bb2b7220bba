"""Measures whether two operator sets have the same training losses."""

import math

import torch

from bench.training.operator_sets import Run


def measure_agreement(args, preset, task):
    """Returns the losses of `args.steps` steps and their largest difference.

    With args.yardstick the last operator set also runs from weights that differ by one rounding,
    which shows how far rounding alone moves the losses apart.
    """
    runs = [Run(name, task, args.seed) for name in args.ops]
    perturbed = Run(args.ops[-1], task, args.seed) if args.yardstick else None
    if perturbed:
        perturb(perturbed.task.model)
    losses, worst, yardstick = [], (0.0, 0), 0.0
    for step in range(1, args.steps + 1):
        losses.append([run.step()[0].item() for run in runs])
        if not all(map(math.isfinite, losses[-1])):
            raise ValueError(f"{preset}: a loss of step {step} is not finite: {losses[-1]}")
        if perturbed:
            yardstick = max(yardstick, abs(perturbed.step()[0].item() - losses[-1][-1]))
        worst = max(worst, (max(losses[-1]) - min(losses[-1]), step))
        if step % 10 == 0 or step == args.steps:
            print(
                f"{preset}: step {step}, loss {losses[-1][0]:.6f}, "
                f"largest difference {worst[0]:.3g} (step {worst[1]})",
                flush=True,
            )
    if perturbed:
        print(
            f"{preset}: {args.ops[-1]} against itself from weights that differ by one rounding: "
            f"{yardstick:.3g}",
            flush=True,
        )
    return {
        "ops": args.ops,
        "steps": args.steps,
        "yardstick": yardstick if perturbed else None,
        "largest difference": worst[0],
        "at step": worst[1],
        "losses": losses,
    }


def perturb(model):
    """Moves every weight to the next larger floating point number."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))
