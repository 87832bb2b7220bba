"""The optimizer, weight averaging, and the decisions that follow from each validation."""

import fnmatch
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fusedseq.optim import NTASGD, non_monotone, replaced
from fusedseq.tasks.training import learning_rate
from fusedseq.tasks.training.settings import one_of


@dataclass(frozen=True)
class TrainingSettings:
    """How long to train, with which optimizer, and what happens when validation stops improving.

    At least one of `epochs` and `steps` is required; the run ends at whichever limit comes first.
    """

    # The number of epochs after which the run ends; None sets no such limit.
    epochs: int | None = 50
    # The number of steps after which the run ends; None sets no such limit.
    steps: int | None = None
    # The optimizer: "sgd" or "adam".
    optimizer: str = "sgd"
    # The learning rate, which warm-up, schedule and annealing multiply by their factors.
    lr: float = 30.0
    # The schedule after the warm-up: "constant"; "linear" or "cosine", which fall to 0; or
    # "inverse-sqrt", which falls as sqrt(warmup_steps / step).
    lr_schedule: str = "constant"
    # The number of first steps in which the learning rate rises linearly, at least 0. The schedule
    # inverse-sqrt needs at least one such step.
    warmup_steps: int = 0
    # The step at which the schedules "linear" and "cosine" reach 0, which must be above
    # warmup_steps; the other schedules do not use it.
    decay_steps: int | None = None
    # The factor of a weight that is added to the gradient of the weight, after clipping.
    weight_decay: float = 0.0
    # The decay rate of Adam's running mean of the gradient, in [0, 1).
    beta1: float = 0.9
    # The decay rate of Adam's running mean of the squared gradient, in [0, 1).
    beta2: float = 0.999
    # The number that Adam adds to the denominator of its update.
    eps: float = 1e-8
    # The largest norm of the gradient of all parameters together, above 0; None does not clip.
    clip: float | None = None
    # Patterns of the names of parameters that are not trained, separated by commas, e.g.
    # "embedding.*,output.*".
    freeze: str = ""
    # The precision of training steps: "fp32", or "bf16" by autocast; weights and validation stay in
    # fp32.
    precision: str = "fp32"
    # Batches in one step; the gradient equals that of one batch with all their items.
    accumulate: int = 1
    # The learning rate is multiplied by anneal_factor after each so many validations in a row
    # without improvement; None does not anneal.
    anneal_after: int | None = None
    # The factor of the learning rate at each annealing, in (0, 1].
    anneal_factor: float = 0.25
    # The run ends after this many validations in a row without improvement; None does not end it.
    stop_after: int | None = None
    # Averaging of the weights, which validations then use: "none"; "nt-asgd", SGD that switches to
    # ASGD (Merity et al., 2018); "tail", the mean of the weights of all steps since the averaging
    # started, beside any optimizer.
    averaging: str = "none"
    # The non-monotone interval n of "nt-asgd", which switches to ASGD at the first validation loss
    # above the lowest of all earlier ones but the last n.
    nonmono: int = 5
    # The averaging "tail" starts after this many validations in a row without improvement.
    tail_after: int = 50
    # The averaging "tail" starts at the validation with this number, counted from 1, if it has not
    # started before.
    tail_from: int = 800
    # Validate every so many steps; None validates after each epoch.
    eval_steps: int | None = None
    # Write a checkpoint every so many steps, in addition to one after each epoch; None writes only
    # that one.
    save_steps: int | None = 500
    # Losses are copied from the device every so many steps. Without clipping the norm of the
    # gradient is computed only in these steps.
    log_steps: int = 1

    def __post_init__(self) -> None:
        for name, known in (
            ("optimizer", ("sgd", "adam")),
            ("averaging", ("none", "nt-asgd", "tail")),
            ("precision", ("fp32", "bf16")),
            ("lr_schedule", learning_rate.SCHEDULES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"training.{name} must be {one_of(known)}, got {getattr(self, name)!r}"
                )
        if self.averaging == "nt-asgd" and self.optimizer != "sgd":
            raise ValueError(
                f"training.averaging nt-asgd needs optimizer sgd, got {self.optimizer}"
            )
        if self.epochs is None and self.steps is None:
            raise ValueError("training.epochs or training.steps must be given, got neither")
        self._check_numbers()
        learning_rate.check(self)

    def _check_numbers(self) -> None:
        """Raises ValueError where a number is out of range."""
        for least, names in LEAST.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and not value >= least:
                    raise ValueError(f"training.{name} must be at least {least}, got {value}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"training.{name} must be in [0, 1), got {getattr(self, name)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(
                f"training.clip must be above 0, or none for no clipping, got {self.clip}"
            )
        if not 0 < self.anneal_factor <= 1:
            raise ValueError(f"training.anneal_factor must be in (0, 1], got {self.anneal_factor}")


# {the least value: the settings}; None, where a setting may be None, is allowed.
LEAST = {
    0: ("epochs", "steps", "lr", "weight_decay", "eps"),
    1: (
        "anneal_after",
        "stop_after",
        "eval_steps",
        "save_steps",
        "log_steps",
        "nonmono",
        "accumulate",
        "tail_after",
        "tail_from",
    ),
}


def freeze(model: torch.nn.Module, patterns: str) -> None:
    """Freezes the parameters whose name matches a shell pattern: the optimizer does not see them.

    patterns: separated by commas
    Errors: ValueError where a pattern matches nothing, or all parameters are frozen
    """
    names = dict(model.named_parameters())
    for pattern in filter(None, (p.strip() for p in patterns.split(","))):
        if not (frozen := fnmatch.filter(names, pattern)):
            parts = ", ".join(
                dict.fromkeys(
                    name.partition(".")[0] + (".*" if "." in name else "") for name in names
                )
            )
            raise ValueError(
                f"training.freeze: {pattern!r} matches no parameter; the parameters are {parts}"
            )
        for name in frozen:
            names[name].requires_grad_(False)
    if not any(p.requires_grad for p in names.values()):
        raise ValueError(f"training.freeze must leave a parameter to train, got {patterns!r}")


class Optimization:
    """The optimizer of `parameters`, its learning rate and its averaged weights."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], settings: TrainingSettings
    ) -> None:
        self.parameters, self.settings = [p for p in parameters if p.requires_grad], settings
        self.lr = settings.lr
        self.optimizer = self._build()
        self.tail: list[torch.Tensor] | None = None  # the mean weights of "tail" averaging
        self.tail_steps = 0  # the number of steps that the mean is over

    def _build(self) -> torch.optim.Optimizer:
        s, common = self.settings, {"lr": self.lr, "weight_decay": self.settings.weight_decay}
        if s.averaging == "nt-asgd":
            return NTASGD(self.parameters, max_norm=s.clip or math.inf, n=s.nonmono, **common)
        fused = all(p.device.type in ("cpu", "cuda") for p in self.parameters)
        if s.optimizer == "adam":
            return torch.optim.Adam(
                self.parameters, betas=(s.beta1, s.beta2), eps=s.eps, fused=fused, **common
            )
        return torch.optim.SGD(self.parameters, fused=fused, **common)

    @property
    def averaging(self) -> bool:
        """Whether averaging has started."""
        return self.tail is not None or (
            isinstance(self.optimizer, NTASGD) and self.optimizer.averaging
        )

    def step(self, lr_scale: float, with_norm: bool = True) -> torch.Tensor | None:
        """One optimizer step with learning rate lr * lr_scale and clipped gradients.

        Returns the norm of the gradient before clipping, a scalar tensor, or None where neither
        clipping nor the caller (`with_norm`) needs it.

        While NT-ASGD averages, it reads the learning rate after its step, for the next step: there
        lr_scale takes effect one step later, as in the AWD-LSTM code.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * lr_scale
        if isinstance(self.optimizer, NTASGD):  # clips the gradients itself
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

    def zero_grad(self) -> None:
        """Sets every gradient to None."""
        self.optimizer.zero_grad(set_to_none=True)

    def anneal(self) -> None:
        """Multiplies the learning rate by anneal_factor."""
        self.lr *= self.settings.anneal_factor

    def start_averaging(self) -> None:
        """Starts the averaging that the settings chose."""
        if isinstance(self.optimizer, NTASGD):
            self.optimizer.start_averaging()
        else:
            self.tail = [torch.zeros_like(p) for p in self.parameters]

    def _averages(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, its average) for the parameters that have an average."""
        if isinstance(self.optimizer, NTASGD):
            return self.optimizer.averages()
        if self.tail is None or not self.tail_steps:
            return []
        return list(zip(self.parameters, self.tail, strict=True))

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the parameters hold their averages, where averages exist."""
        return replaced(self._averages())

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {
            "lr": self.lr,
            "optimizer": self.optimizer.state_dict(),
            "tail": self.tail,
            "tail_steps": self.tail_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Errors: ValueError or TypeError where the state is not that of an optimizer of these
            parameters: torch's optimizers do not compare the shapes
        """
        self.lr, self.tail_steps = number(state, "lr"), number(state, "tail_steps", whole=True)
        tail = state["tail"]
        for p, t in zip(self.parameters, self.parameters if tail is None else tail, strict=True):
            _check_like(p, t, "tail")
        for index, values in state["optimizer"]["state"].items():
            p = self.parameters[index]
            for name, value in values.items():
                if name == "step" or not isinstance(value, torch.Tensor):
                    number({name: value.item() if isinstance(value, torch.Tensor) else value}, name)
                else:
                    _check_like(p, value, f"optimizer's {name}")
        self.optimizer = self._build()
        options = [{**group, "params": None} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, built in zip(self.optimizer.param_groups, options, strict=True):
            # The options are those of the settings, which cannot have changed.
            group.update({k: v for k, v in built.items() if k not in ("params", "lr")})
            number(group, "lr")
        if tail is not None:
            self.tail = [t.to(p.device) for t, p in zip(tail, self.parameters, strict=True)]


class Schedule:
    """Decides from the validation losses when to anneal, to start averaging, and to stop."""

    def __init__(self, settings: TrainingSettings) -> None:
        self.settings = settings
        self.losses: list[float] = []
        self.best: float | None = None  # the lowest loss

    @property
    def since_best(self) -> int:
        """The number of validations since the best one."""
        return len(self.losses) - 1 - self.losses.index(self.best) if self.losses else 0

    @property
    def stopped(self) -> bool:
        """Whether the run ends by early stopping."""
        return self.settings.stop_after is not None and self.since_best >= self.settings.stop_after

    def observe(self, loss: float) -> set[str]:
        """Adds a validation loss; returns the events it causes: "improved", "anneal", "average"."""
        s = self.settings
        events: set[str] = set()
        if s.averaging == "nt-asgd" and non_monotone(self.losses, loss, s.nonmono):
            events.add("average")
        self.losses.append(loss)
        if self.best is None or loss < self.best:
            self.best = loss
            events.add("improved")
        if s.averaging == "tail" and (
            self.since_best >= s.tail_after or len(self.losses) >= s.tail_from
        ):
            events.add("average")
        if s.anneal_after and self.since_best and self.since_best % s.anneal_after == 0:
            events.add("anneal")
        return events

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"losses": self.losses, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned. Errors: ValueError where it is another state"""
        losses, best = [*state["losses"]], state["best"]
        for i in range(len(losses)):
            number(losses, i)
        if best != min(losses, default=None):
            raise ValueError(f"best must be the lowest of the {len(losses)} losses, got {best}")
        self.losses, self.best = losses, best


def number(state: Any, key: Any, whole: bool = False) -> Any:
    """The number state[key] of a checkpoint.

    whole: whether it must be an integer of at least 0
    Errors: ValueError where it is not such a number
    """
    value = state[key]
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or (whole and value < 0):
        raise ValueError(
            f"{key} must be {'a natural number' if whole else 'a number'}, got {value!r:.60}"
        )
    return value


def _check_like(parameter: torch.Tensor, found: Any, name: str) -> None:
    """Raises ValueError where a tensor of a checkpoint does not have a parameter's shape."""
    shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
    if shape != tuple(parameter.shape):
        raise ValueError(
            f"{name} must have a parameter's shape {tuple(parameter.shape)}, got {shape}"
        )
