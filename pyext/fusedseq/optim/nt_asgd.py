from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from fusedseq import _load

_load.operators()
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def non_monotone(losses, loss, n=5):
    """The trigger of NT-ASGD (Merity et al., 2018): whether a validation loss is worse than the best of those before the
    last `n`; `losses` are all before it."""
    return len(losses) > n and loss > min(losses[:-n])


@contextmanager
def replaced(pairs):
    """Within it each parameter of the (parameter, value) pairs has the value; after it, what it had, bit for bit."""
    kept = [(p, p.detach().clone()) for p, _ in pairs]
    with torch.no_grad():
        for p, value in pairs:
            p.copy_(value)
        try:
            yield
        finally:
            for p, value in kept:
                p.copy_(value)


class NTASGD(Optimizer):
    """Non-monotonically triggered averaged SGD (Merity et al., 2018, algorithm 1), with gradient clipping, in one pass.

    SGD until the trigger, then SGD with an average of the parameters beside it: `torch.optim.ASGD` with lambd = 0 and
    t0 = 0, whose average after step k of averaging is the mean of p_2 to p_k, and whose learning rate, as there and in the
    AWD-LSTM code, is read after each step for the next.

    params: as in any optimiser; fp32, fp64 or bf16, any dense layout    lr, weight_decay: of each parameter group
    max_norm: gradients are clipped to this norm over all groups, as clip_grad_norm_ does, but in the pass of the step:
    `.grad` stays as it was; math.inf: measured, not clipped; None: not even measured. `grad_norm` is the norm of the last
    step before clipping, a scalar tensor on the device.
    n: the non-monotone interval

    Nothing is read back from the device. A sparse gradient is made dense first: the average moves everywhere. The averages
    of bf16 parameters are fp32, in which a mean over many steps does not stand still.
    Errors: TypeError for other dtypes; ValueError for a negative lr, weight_decay or max_norm, or n below 1.
    """

    def __init__(self, params, lr, *, weight_decay=0.0, max_norm=None, n=5):
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("max_norm", max_norm)):
            if value is not None and not value >= 0:
                raise ValueError(f"NTASGD: {name} must be at least 0, got {value}")
        if n < 1:
            raise ValueError(f"NTASGD: n must be at least 1, got {n}")
        self.max_norm, self.n = max_norm, n
        self.averaging, self.losses, self.grad_norm = False, [], None
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in DTYPES:
                raise TypeError(f"NTASGD: parameters must be float32, float64 or bfloat16, got {p.dtype}")

    def observe(self, loss):
        """Takes one more validation loss, and starts averaging where it triggers that; returns whether averaging is on."""
        if non_monotone(self.losses, loss, self.n):
            self.start_averaging()
        self.losses.append(loss)
        return self.averaging

    def start_averaging(self):
        self.averaging = True

    def averages(self):
        """(parameter, its average) for those that have one."""
        return [(p, state["average"]) for p, state in self.state.items()]

    def averaged(self):
        """Within it the parameters are their averages, where there are any; after it they are what they were."""
        return replaced(self.averages())

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            (group, p, gradient_as(p)) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if self.max_norm is not None:
            self.grad_norm = total_norm([g for _, _, g in work]) if work else torch.zeros(())
        calls: dict[tuple, tuple[list, list, list]] = {}  # those of one device and the same numbers
        for group, p, g in work:
            lr, mu, average = self._advance(group, p)
            lists = calls.setdefault((p.device, lr, group["weight_decay"], mu), ([], [], []))
            for some, t in zip(lists, (p, g, average), strict=True):
                some += [] if t is None else [t]
        for (device, lr, weight_decay, mu), (params, grads, averages) in calls.items():
            self._update(device, params, grads, averages, lr, weight_decay, mu)
        return loss

    def _advance(self, group, p):
        """The learning rate of this step of p, the weight of the new p in its average, and this average or None."""
        if not self.averaging:
            return float(group["lr"]), 1.0, None
        state = self.state[p]
        if not state:
            wide = torch.float64 if p.dtype == torch.float64 else torch.float32
            state.update(step=0, eta=float(group["lr"]), average=torch.empty_like(p, dtype=wide))
        lr, mu = state["eta"], 1 / max(1, state["step"])
        state["step"], state["eta"] = state["step"] + 1, float(group["lr"])
        return lr, mu, state["average"]

    def _update(self, device, params, grads, averages, lr, weight_decay, mu):
        flat = [p if is_dense(p) else p.contiguous() for p in params]
        norm = None if self.max_norm is None else self.grad_norm.to(device)
        torch.ops.fusedseq.nt_asgd_step_(flat, grads, averages, norm, self.max_norm or 0.0, lr, weight_decay, mu)
        for p, updated in zip(params, flat, strict=True):
            if p is not updated:
                p.copy_(updated)

    def __getstate__(self):  # for pickle and deepcopy, of which Optimizer keeps its own three
        own = ("max_norm", "n", "averaging", "losses", "grad_norm")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def state_dict(self):
        return {**super().state_dict(), "averaging": self.averaging, "losses": list(self.losses)}

    def load_state_dict(self, state_dict):
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.averaging, self.losses = state_dict["averaging"], list(state_dict["losses"])
        # Optimizer casts what it loads to the dtype of the parameter: not so the averages of bf16.
        every = [p for group in self.param_groups for p in group["params"]]
        for i, state in state_dict["state"].items():
            own = self.state[every[i]]
            own["average"] = torch.empty_like(every[i], dtype=state["average"].dtype).copy_(state["average"])


def is_dense(t):
    """Whether the elements stand in memory without gaps, in any order of the dimensions."""
    return (
        t.numel() == 0 or 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) == t.numel()
    )


def gradient_as(p):
    """p's gradient in the layout that `_update` gives p, which the kernel's one index for all tensors needs."""
    g = p.grad.to_dense() if p.grad.is_sparse else p.grad
    wanted = p if is_dense(p) else p.contiguous()
    if g.stride() == wanted.stride() or g.numel() < 2:
        return g
    return torch.empty_like(wanted).copy_(g)


def total_norm(grads):
    """The norm over all gradients, on the device of the first."""
    devices: dict[torch.device, list] = {}
    for g in grads:
        devices.setdefault(g.device, []).append(g)
    norms = [torch.ops.fusedseq.nt_asgd_norm(some) for some in devices.values()]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(grads[0].device) for norm in norms]))
