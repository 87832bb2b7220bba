"""How the learning rate moves with the steps: a pure function of the step, so that there is nothing to save."""

import math

SCHEDULES = ("constant", "linear", "inverse-sqrt")


def lr_factor(settings, step):
    """What the learning rate of a step is multiplied by. step: how many were taken before it

    It rises linearly over `warmup_steps`: its first step has 1 / warmup_steps, its last 1. From there it is constant;
    or falls linearly, to 0 at `decay_steps`; or falls as sqrt(warmup_steps / step) (Vaswani et al., 2017, whose
    peak d_model^-.5 warmup_steps^-.5 is `lr` here). Annealing on plateau comes on top of each.
    """
    s, step = settings, step + 1
    if step <= s.warmup_steps:
        return step / s.warmup_steps
    if s.lr_schedule == "linear":
        return max(0.0, (s.decay_steps - step) / (s.decay_steps - s.warmup_steps))
    return math.sqrt(s.warmup_steps / step) if s.lr_schedule == "inverse-sqrt" else 1.0


def check(settings):
    s = settings
    if s.warmup_steps < 0:
        raise ValueError(f"training.warmup_steps must be at least 0, got {s.warmup_steps}")
    if s.lr_schedule == "inverse-sqrt" and not s.warmup_steps:
        raise ValueError("training.lr_schedule inverse-sqrt needs warmup_steps of at least 1, got 0")
    if s.lr_schedule == "linear" and (s.decay_steps is None or s.decay_steps <= s.warmup_steps):
        raise ValueError(f"training.lr_schedule linear needs decay_steps above warmup_steps = {s.warmup_steps}, "
                         f"got {s.decay_steps}")  # fmt: skip
