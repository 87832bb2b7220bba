"""Learning-rate schedules, as pure functions of the step: there is no state to checkpoint."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusedseq.tasks.training.optimization import TrainingSettings

SCHEDULES = ("constant", "linear", "cosine", "inverse-sqrt")
TO_ZERO = ("linear", "cosine")  # those that reach 0 at decay_steps


def lr_factor(settings: "TrainingSettings", step: int) -> float:
    """The factor that the learning rate of a step is multiplied by.

    step: the number of steps taken before it

    The factor rises linearly over `warmup_steps` steps, from 1 / warmup_steps to 1. Afterwards it
    is constant, or falls to 0 at `decay_steps`, linearly or along half a cosine wave (Loshchilov
    and Hutter, 2017, without restarts), or falls as sqrt(warmup_steps / step) (Vaswani et al.,
    2017, whose peak d_model^-.5 warmup_steps^-.5 is `lr` here). Annealing after validations without
    improvement applies in addition.
    """
    s, step = settings, step + 1
    if step <= s.warmup_steps:
        return step / s.warmup_steps
    if s.lr_schedule in TO_ZERO:
        left = max(0.0, (s.decay_steps - step) / (s.decay_steps - s.warmup_steps))
        return left if s.lr_schedule == "linear" else (1 - math.cos(math.pi * left)) / 2
    return math.sqrt(s.warmup_steps / step) if s.lr_schedule == "inverse-sqrt" else 1.0


def check(settings: "TrainingSettings") -> None:
    """Raises ValueError where the settings of the schedule contradict each other."""
    s = settings
    if s.warmup_steps < 0:
        raise ValueError(f"training.warmup_steps must be at least 0, got {s.warmup_steps}")
    if s.lr_schedule == "inverse-sqrt" and not s.warmup_steps:
        raise ValueError(
            "training.lr_schedule inverse-sqrt needs warmup_steps of at least 1, got 0"
        )
    if s.lr_schedule in TO_ZERO and (s.decay_steps is None or s.decay_steps <= s.warmup_steps):
        raise ValueError(
            f"training.lr_schedule {s.lr_schedule} needs decay_steps above warmup_steps = "
            f"{s.warmup_steps}, got {s.decay_steps}"
        )
