"""Non-monotonically triggered averaged SGD, over `nt_asgd_norm` and `nt_asgd_step_`."""

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fusedseq import _load

_load.operators()


def _fake_norm(grads: list[Tensor]) -> Tensor:
    is_exact = any(g.dtype == torch.float64 for g in grads)
    return grads[0].new_empty((), dtype=torch.float64 if is_exact else torch.float32)


torch.library.register_fake("fusedseq::nt_asgd_norm", _fake_norm)
torch.library.register_fake("fusedseq::nt_asgd_step_", lambda *_: None)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
KINDS: Any = (numbers.Real, Tensor)  # of numbers; mypy has no order of numbers.Real


def non_monotone(losses: Sequence[float], loss: float, n: int = 5) -> bool:
    """Returns whether a validation loss triggers averaging (Merity et al., 2018, algorithm 1).

    It does if it is worse than the best of the losses before the last `n`.
    losses: all previous validation losses, in order    loss: the new one
    n: the non-monotone interval
    A loss that is NaN is never the best one.
    Errors: TypeError for an n that is not a whole number; ValueError for n below 1
    """
    check_interval("non_monotone", n)
    known = [earlier for earlier in losses[:-n] if not math.isnan(earlier)]
    return len(losses) > n and loss > min(known, default=math.inf)


def check_interval(name: str, n: Any) -> None:
    """Requires a non-monotone interval, a whole number of at least 1."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"{name}: n must be a whole number, got {type(n).__name__}")
    if n < 1:
        raise ValueError(f"{name}: n must be at least 1, got {n}")


@contextmanager
def replaced(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """A context in which parameters have other values; they are restored bit for bit at its end.

    pairs: (parameter, value), of equal shapes each
    """
    originals = [(p, p.detach().clone()) for p, _ in pairs]
    try:
        _copy(pairs)
        yield
    finally:
        _copy(originals)


@torch.no_grad()
def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for p, value in pairs:
        p.copy_(value)


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step that tensors updated in one call of the operator share."""

    device: torch.device
    lr: float
    weight_decay: float
    mu: float  # the weight of the new parameter in its average


class NTASGD(Optimizer):
    """Non-monotonically triggered averaged SGD with gradient clipping, in one pass.

    Merity et al., 2018, algorithm 1. The optimizer is SGD until averaging is triggered, and then
    SGD that also averages the parameters. This is `torch.optim.ASGD` with lambd = 0 and t0 = 0: the
    average after step k of averaging is the mean of p_2 to p_k. As there and in the AWD-LSTM code,
    the learning rate of an averaging step is the one that was set at the end of the step before.

    params: as in any optimizer; fp32, fp64 or bf16, any dense layout
    lr, weight_decay: of each parameter group
    max_norm: gradients are clipped to this norm over all groups, as by clip_grad_norm_, but in the
        pass of the step, so `.grad` is not modified. math.inf measures the norm without clipping,
        None does not measure it. `grad_norm` is the norm of the last step before clipping, a scalar
        tensor on the device
    n: the non-monotone interval

    No value is read back from the device. A sparse gradient is made dense first, because the
    average changes everywhere. The averages of bf16 parameters are fp32: in bf16 a mean over many
    steps would stop changing.
    Errors: TypeError for other dtypes, and for a setting that is not a number; ValueError for a
    negative lr, weight_decay or max_norm, or n below 1.
    """

    grad_norm: Tensor | None

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        n: int = 5,
    ) -> None:
        check_number("lr", lr)
        check_number("weight_decay", weight_decay)
        if max_norm is not None:
            check_number("max_norm", max_norm)
        check_interval("NTASGD", n)
        self.max_norm, self.n = max_norm, n
        self.averaging = False
        self.losses: list[float] = []  # all that `observe` received
        self.grad_norm = None
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer; raises TypeError or ValueError for a parameter of another dtype
        and for another lr or weight_decay, without adding the group.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def observe(self, loss: float) -> bool:
        """Records a validation loss and starts averaging if it triggers it.

        loss: a number, or a tensor of one    returns whether averaging is on
        Errors: TypeError for anything else
        """
        is_one = not isinstance(loss, Tensor) or loss.numel() == 1
        if isinstance(loss, bool) or not isinstance(loss, KINDS) or not is_one:
            raise TypeError(f"NTASGD: loss must be a number, got {type(loss).__name__}")
        loss = float(loss.item() if isinstance(loss, Tensor) else loss)  # which a checkpoint holds
        if non_monotone(self.losses, loss, self.n):
            self.start_averaging()
        self.losses.append(loss)
        return self.averaging

    def start_averaging(self) -> None:
        """Starts averaging at the next step."""
        self.averaging = True

    def averages(self) -> list[tuple[Tensor, Tensor]]:
        """Returns (parameter, its average) for each parameter that has an average."""
        return [(p, state["average"]) for p, state in self.state.items()]

    def averaged(self) -> AbstractContextManager[None]:
        """Returns a context in which the parameters are their averages; see `replaced`."""
        return replaced(self.averages())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient, and their averages.

        closure: recomputes the loss and its gradients, as in torch.optim
        returns the closure's result, or None
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            (group, p, gradient_as(p))
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if self.max_norm is not None:
            first = self.param_groups[0]["params"][:1]
            zero = torch.zeros((), device=first[0].device if first else None)
            self.grad_norm = total_norm([g for _, _, g in work]) if work else zero
        # One call of the operator for all tensors of one device with the same numbers.
        calls: dict[StepNumbers, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
        for group, p, g in work:
            lr, mu, average = self._advance(group, p)
            numbers = StepNumbers(p.device, lr, group["weight_decay"], mu)
            params, grads, averages = calls.setdefault(numbers, ([], [], []))
            params.append(p)
            grads.append(g)
            if average is not None:
                averages.append(average)
        for numbers, tensors in calls.items():
            self._update(numbers, *tensors)
        return loss

    def _advance(self, group: dict[str, Any], p: Tensor) -> tuple[float, float, Tensor | None]:
        """Returns lr of this step of p, the weight of the new p in its average, and the average."""
        if not self.averaging:
            return float(group["lr"]), 1.0, None
        state = self.state[p]
        if not state:
            state.update(step=0, eta=float(group["lr"]), average=empty_average(p))
        lr, mu = state["eta"], 1 / max(1, state["step"])
        state["step"], state["eta"] = state["step"] + 1, float(group["lr"])
        return lr, mu, state["average"]

    def _update(
        self,
        numbers: StepNumbers,
        params: list[Tensor],
        grads: list[Tensor],
        averages: list[Tensor],
    ) -> None:
        flat = [p if is_dense(p) else p.contiguous() for p in params]
        norm = None
        if self.max_norm is not None and self.grad_norm is not None:
            norm = self.grad_norm.to(numbers.device)
        torch.ops.fusedseq.nt_asgd_step_(
            flat,
            grads,
            averages,
            norm,
            self.max_norm or 0.0,
            numbers.lr,
            numbers.weight_decay,
            numbers.mu,
        )
        # The operator's schema says that it writes to the tensors of its lists, but the dispatcher
        # counts no versions of these: a backward that still needs the old values is to raise.
        torch.autograd.graph.increment_version([*flat, *averages])
        for p, updated in zip(params, flat, strict=True):
            if p is not updated:
                p.copy_(updated)

    def __getstate__(self) -> dict[str, Any]:
        # For pickle and deepcopy: Optimizer.__getstate__ returns three attributes of its own only.
        own = ("max_norm", "n", "averaging", "losses", "grad_norm")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer, with `averaging` and `losses`.

        The parameter groups have both too, because torch.distributed.checkpoint saves nothing else.
        """
        own = {"averaging": self.averaging, "losses": list(self.losses)}
        saved = super().state_dict()
        return {**saved, "param_groups": [{**g, **own} for g in saved["param_groups"]], **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, averages in the dtype that those of a parameter have.

        Errors: ValueError for the state of another optimizer
        """
        groups = state_dict["param_groups"]
        own = {**(groups[0] if groups else {}), **state_dict}
        if missing := {"averaging", "losses"} - own.keys():
            raise ValueError(
                "NTASGD: state_dict must be that of an NTASGD, got one without "
                f"{' and '.join(sorted(missing))}"
            )
        super().load_state_dict({"state": state_dict["state"], "param_groups": groups})
        self.averaging, self.losses = own["averaging"], list(own["losses"])
        for group in self.param_groups:
            group.pop("averaging", None)
            group.pop("losses", None)
        # Optimizer casts the state to the parameter's dtype, which would round the fp32 averages of
        # bf16 parameters. A saved state has the key that its parameter has in the saved groups.
        params = [p for group in self.param_groups for p in group["params"]]
        keys = [key for group in groups for key in group["params"]]
        for key, p in zip(keys, params, strict=True):
            if saved := state_dict["state"].get(key):
                self.state[p]["average"] = empty_average(p).copy_(saved["average"])


def empty_average(p: Tensor) -> Tensor:
    """Memory for a parameter's average: in fp64 for fp64, in fp32 for all others."""
    return torch.empty_like(p, dtype=torch.promote_types(p.dtype, torch.float32))


def check_group(group: dict[str, Any]) -> None:
    """Requires settings and dtypes of a parameter group that a step can use."""
    for name in ("lr", "weight_decay"):
        check_number(name, group[name])
    if any(type(p).__module__.startswith("torch.distributed.") for p in group["params"]):
        raise TypeError(
            "NTASGD: parameters must be whole in each process, as DistributedDataParallel has "
            "them, got a DTensor, as fully_shard makes: torch.optim.ASGD takes those"
        )
    wrong = [p.dtype for p in group["params"] if p.dtype not in DTYPES]
    if wrong:
        raise TypeError(f"NTASGD: parameters must be float32, float64 or bfloat16, got {wrong[0]}")


def check_number(name: str, value: Any) -> None:
    """Requires a number of at least 0; torch's optimizers take a tensor as lr, too."""
    is_one = not isinstance(value, Tensor) or value.numel() == 1
    if isinstance(value, bool) or not isinstance(value, KINDS) or not is_one:
        raise TypeError(f"NTASGD: {name} must be a number, got {type(value).__name__}")
    if not value >= 0:
        raise ValueError(f"NTASGD: {name} must be at least 0, got {value}")


def is_dense(t: Tensor) -> bool:
    """Returns whether the elements are in memory without gaps, in any order of the dimensions."""
    if t.numel() == 0:
        return True
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return 1 + last == t.numel()


def gradient_as(p: Tensor) -> Tensor:
    """Returns p's gradient, dense and in the layout of p that `_update` passes to the operator.

    The kernel uses one index for all tensors, so their layouts must be equal.
    """
    assert p.grad is not None, "step selects the parameters that have a gradient"
    g = p.grad.to_dense() if p.grad.is_sparse else p.grad
    layout = p if is_dense(p) else p.contiguous()
    if g.stride() == layout.stride() or g.numel() < 2:
        return g
    return torch.empty_like(layout).copy_(g)


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Returns the norm over all gradients, a scalar on the device of the first one."""
    devices: dict[torch.device, list[Tensor]] = {}
    for g in grads:
        devices.setdefault(g.device, []).append(g)
    norms: list[Tensor] = [
        torch.ops.fusedseq.nt_asgd_norm(on_device) for on_device in devices.values()
    ]
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack([norm.to(grads[0].device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(stacked)
    return total
