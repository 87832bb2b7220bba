"""The optimiser, its averaging, and the decisions taken after each validation; no task knowledge."""

import fnmatch
import math
from dataclasses import dataclass

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fusedseq.optim import NTASGD, non_monotone, replaced
from fusedseq.tasks.training import learning_rate


@dataclass(frozen=True)
class TrainingSettings:
    """How long, with which optimiser, and what happens when validation stops improving."""

    epochs: int | None = 50
    steps: int | None = None  # a limit in steps; whichever comes first
    optimizer: str = "sgd"  # or "adam"
    lr: float = 30.0
    lr_schedule: str = "constant"  # after the warm-up; or "linear", "inverse-sqrt": see learning_rate.py
    warmup_steps: int = 0
    decay_steps: int | None = None  # "linear" is at 0 then
    weight_decay: float = 0.0
    beta1: float = 0.9  # of Adam
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float | None = None  # largest gradient norm
    freeze: str = (
        ""  # parameters that stay as they are: patterns of their names, by commas, e.g. "embedding.*,output.*"
    )
    precision: str = "fp32"  # or "bf16": autocast of the training steps; weights and validation stay fp32
    accumulate: int = 1  # batches of one step, whose gradient is that of them all in one
    anneal_after: int | None = None  # validations without improvement (and every so many), then lr *= anneal_factor
    anneal_factor: float = 0.25
    stop_after: int | None = None  # validations without improvement
    averaging: str = "none"  # "nt-asgd": SGD, then ASGD (Merity et al., 2018); "tail": average the weights beside it
    nonmono: int = 5  # n of NT-ASGD
    tail_after: int = 50  # "tail" begins after so many validations without improvement,
    tail_from: int = 800  # or at this validation
    eval_steps: int | None = None  # validate every so many steps instead of after each epoch
    save_steps: int | None = 500  # checkpoint every so many steps, and after each epoch
    log_steps: int = 1  # losses are fetched from the device every so many steps; unclipped, the norm is taken only then

    def __post_init__(self):
        for name, known in (("optimizer", ("sgd", "adam")), ("averaging", ("none", "nt-asgd", "tail")),
                            ("precision", ("fp32", "bf16")), ("lr_schedule", learning_rate.SCHEDULES)):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"training.{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.averaging == "nt-asgd" and self.optimizer != "sgd":
            raise ValueError(f"training.averaging nt-asgd needs optimizer sgd, got {self.optimizer}")
        if self.epochs is None and self.steps is None:
            raise ValueError("training.epochs or training.steps must be given, got neither")
        for name in ("epochs", "steps"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"training.{name} must be at least 0, got {getattr(self, name)}")
        for name in ("anneal_after", "stop_after", "eval_steps", "save_steps", "log_steps", "nonmono", "accumulate"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"training.{name} must be at least 1, got {getattr(self, name)}")
        learning_rate.check(self)


def freeze(model, patterns):
    """Parameters whose name a pattern fits (as in a shell) need no gradient, and the optimiser never sees them."""
    names = dict(model.named_parameters())
    for pattern in filter(None, (p.strip() for p in patterns.split(","))):
        if not (frozen := fnmatch.filter(names, pattern)):
            parts = ", ".join(dict.fromkeys(name.partition(".")[0] + (".*" if "." in name else "") for name in names))
            raise ValueError(f"training.freeze: {pattern!r} fits no parameter; they are {parts}")
        for name in frozen:
            names[name].requires_grad_(False)
    if not any(p.requires_grad for p in names.values()):
        raise ValueError(f"training.freeze must leave a parameter to train, got {patterns!r}")


class Optimization:
    """The optimiser of `parameters`, its learning rate and its averaged weights."""

    def __init__(self, parameters, settings):
        self.parameters, self.settings = [p for p in parameters if p.requires_grad], settings
        self.lr = settings.lr
        self.optimizer = self._build()
        self.tail: list[torch.Tensor] | None = None
        self.tail_steps = 0  # how many weights the mean is over

    def _build(self):
        s, common = self.settings, {"lr": self.lr, "weight_decay": self.settings.weight_decay}
        if s.averaging == "nt-asgd":
            return NTASGD(self.parameters, max_norm=s.clip or math.inf, n=s.nonmono, **common)
        fused = all(p.device.type in ("cpu", "cuda") for p in self.parameters)
        if s.optimizer == "adam":
            return torch.optim.Adam(self.parameters, betas=(s.beta1, s.beta2), eps=s.eps, fused=fused, **common)
        return torch.optim.SGD(self.parameters, fused=fused, **common)

    @property
    def averaging(self):
        return self.tail is not None or (isinstance(self.optimizer, NTASGD) and self.optimizer.averaging)

    def step(self, lr_scale, with_norm=True):
        """One step with lr * lr_scale, gradients clipped; returns their norm before it, a scalar tensor, or None where
        nothing needs it, neither the clipping nor the caller.

        Where NT-ASGD averages it reads the learning rate after its step, for the next one: there the scale lags by a
        step, as in the AWD-LSTM code.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * lr_scale
        if isinstance(self.optimizer, NTASGD):  # which clips on the way
            self.optimizer.step()
            return self.optimizer.grad_norm
        norm = None
        if with_norm or self.settings.clip:
            norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.settings.clip:
            clip_grads_with_norm_(self.parameters, self.settings.clip, norm)
        self.optimizer.step()
        if self.tail is not None:
            self.tail_steps += 1
            for average, p in zip(self.tail, self.parameters, strict=True):
                average.lerp_(p.detach(), 1 / self.tail_steps)
        return norm

    def zero_grad(self):
        self.optimizer.zero_grad(set_to_none=True)

    def anneal(self):
        self.lr *= self.settings.anneal_factor

    def start_averaging(self):
        if isinstance(self.optimizer, NTASGD):
            self.optimizer.start_averaging()
        else:
            self.tail = [torch.zeros_like(p) for p in self.parameters]

    def _averages(self):
        """(parameter, its average) for those that have one."""
        if isinstance(self.optimizer, NTASGD):
            return self.optimizer.averages()
        if self.tail is None or not self.tail_steps:
            return []
        return list(zip(self.parameters, self.tail, strict=True))

    def averaged(self):
        """Within it the parameters are their averages, where there are any; after it they are what they were."""
        return replaced(self._averages())

    def state_dict(self):
        return {
            "lr": self.lr, "optimizer": self.optimizer.state_dict(), "tail": self.tail,
            "tail_steps": self.tail_steps,
        }  # fmt: skip

    def load_state_dict(self, state):
        self.lr, self.tail_steps = state["lr"], state["tail_steps"]
        self.optimizer = self._build()
        self.optimizer.load_state_dict(state["optimizer"])
        if state["tail"] is not None:
            self.tail = [t.to(p.device) for t, p in zip(state["tail"], self.parameters, strict=True)]


class Schedule:
    """What follows from the validation losses: annealing, averaging, the end."""

    def __init__(self, settings):
        self.settings, self.losses, self.best = settings, [], None

    @property
    def since_best(self):
        """Validations since the best one."""
        return len(self.losses) - 1 - self.losses.index(self.best) if self.losses else 0

    @property
    def stopped(self):
        return self.settings.stop_after is not None and self.since_best >= self.settings.stop_after

    def observe(self, loss):
        """Takes one more validation loss; returns the set of what follows from it: improved, anneal, average."""
        s, follows = self.settings, set()
        if s.averaging == "nt-asgd" and non_monotone(self.losses, loss, s.nonmono):
            follows.add("average")
        self.losses.append(loss)
        if self.best is None or loss < self.best:
            self.best = loss
            follows.add("improved")
        if s.averaging == "tail" and (self.since_best >= s.tail_after or len(self.losses) >= s.tail_from):
            follows.add("average")
        if s.anneal_after and self.since_best and self.since_best % s.anneal_after == 0:
            follows.add("anneal")
        return follows

    def state_dict(self):
        return {"losses": self.losses, "best": self.best}

    def load_state_dict(self, state):
        self.losses, self.best = list(state["losses"]), state["best"]
