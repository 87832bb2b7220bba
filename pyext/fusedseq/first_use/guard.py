"""Guards: kernels that stand before those of an operator until its first call on a GPU.

A guard is registered with torch's dispatcher over the operator's own kernel. At its first call it
removes itself, which uncovers that kernel, and compares the operator with its oracle. Later calls
find the kernel itself: a guard costs nothing after the first call, and nothing on other devices.
The comparison calls the operator too, and does not come back here, as the guard is gone by then.
In a process that sees GPUs of several kinds the guard comes back until there was a call on each.

Where kernels disagree, others take their place that compute the oracle.

Nothing is compared while torch.compile traces (no kernel runs then; the compiled graph meets the
guard when it runs), while a CUDA graph is captured (the comparison would have to synchronize),
inside of a backward (whose thread the comparison's own backward would wait for) or inside of a
comparison (another operator's, which waits for this call): such a call runs unverified, and the
next one is compared.
"""

import functools
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedseq import _load, reference
from fusedseq.first_use.compare import compare_in_thread, is_comparing
from fusedseq.first_use.verdicts import AGREES, LOOP_ALONE, Verdict, Verdicts, identity_of
from fusedseq.fused import autograd
from fusedseq.fused.gradient import Rule, overloads
from fusedseq.fused.schema import Gradients, Named
from fusedseq.fused.through_oracle import call_reference

# Compute capabilities of GPUs on which `make gpu` has passed, with its results committed.
VERIFIED: frozenset[str] = frozenset()
# Oracles of what a kernel computes and the oracle for derivatives does not.
ORACLES: dict[str, Callable[[Named], Tensor]] = {
    "embedding_backward": importlib.import_module("fusedseq.fused.embedding").rows_by_oracle
}
FURTHER = {"linear_cross_entropy": ("linear_cross_entropy_scale",)}  # kernels beside `_backward`


def _visible_gpus() -> list[torch.device]:
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


class Guards:
    """The guards of all operators for one dispatch key.

    key: "CUDA"; tests use "CPU"    identity: (device) -> what verdicts depend on
    compare: (operator, device) -> its verdict    always: ignores cached verdicts
    devices: () -> those that calls may be on
    """

    def __init__(
        self,
        key: str = "CUDA",
        always: bool = False,
        identity: Callable[[torch.device], dict[str, str]] = identity_of,
        compare: Callable[[str, torch.device], Verdict] = compare_in_thread,
        devices: Callable[[], list[torch.device]] = _visible_gpus,
    ):
        self.key, self.always, self.identity, self.compare = key, always, identity, compare
        self.devices = devices
        self.judged: dict[str, set[torch.device]] = {}  # operator: where it was called and agreed
        self.lock = threading.RLock()
        self.libraries: dict[str, torch.library.Library] = {}
        self.kernels: dict[str, Any] = {}  # operator: the kernel that its guard stands before
        self.replaced: list[torch.library.Library] = []  # the oracles in place of kernels

    def install(self) -> None:
        for op in reference.__all__:
            name = f"fusedseq::{op}"
            if op in overloads and torch._C._dispatch_has_kernel_for_dispatch_key(name, self.key):
                self.raise_guard(op)

    def raise_guard(self, op: str) -> None:
        self.kernels[op] = torch.library.get_kernel(overloads[op], self.key)
        guard = functools.partial(self.first_call, op)
        self.libraries[op] = _registered({op: guard}, self.key, with_keyset=True)

    def lift(self, op: str) -> None:
        if op in self.libraries:
            self.libraries.pop(op)._destroy()

    def first_call(self, op: str, keyset: Any, *inputs: Any) -> Any:
        device = next(t.device for t in inputs if isinstance(t, Tensor))
        if _cannot_compare(device):  # and must not wait for a comparison that waits for this call
            return self.kernels[op].call_boxed(keyset, *inputs)
        with self.lock:
            if op in self.libraries and device not in self.judged.get(op, ()):
                self.lift(op)
                try:
                    self.judge(op, device)
                except autograd.SwitchedOff:
                    if _restarts():
                        raise
                except BaseException:
                    self.raise_guard(op)
                    raise
                else:
                    self.judged.setdefault(op, set()).add(device)
                    if self.awaits_another_kind(op):
                        self.raise_guard(op)
            is_guarded = op in self.libraries
        return (
            self.kernels[op].call_boxed(keyset, *inputs) if is_guarded else overloads[op](*inputs)
        )

    def awaits_another_kind(self, op: str) -> bool:
        """Whether there is a device of a kind on which the operator was not called yet."""
        judged = [self.identity(device) for device in self.judged[op]]
        return any(self.identity(device) not in judged for device in self.devices())

    def judge(self, op: str, device: torch.device) -> None:
        """Compares an operator, unless its verdict is known, and acts on the verdict.

        Errors: autograd.SwitchedOff if the kernels were switched off; those of `compare`
        """
        identity = self.identity(device)
        if identity["capability"] in VERIFIED:
            return
        verdicts = Verdicts(identity)
        verdict = None if self.always else verdicts.read().get(op)
        if verdict is None:
            verdict = self.compare(op, device)
            verdicts.add(op, verdict)
        if verdict.found == AGREES:
            return
        if verdict.found == LOOP_ALONE:
            os.environ["FUSEDSEQ_RECURRENCE"] = "loop"
            instead = "all recurrences of this process run the loop (FUSEDSEQ_RECURRENCE=loop)"
        else:
            self.switch_off(op)
            instead = f"calls are computed by fusedseq.reference.{op}, which is slow"
        gpu = f"{identity['gpu']}, compute capability {identity['capability']}"
        warnings.warn(
            f"fusedseq: {op}: the kernels disagree with the oracle on this GPU ({gpu}), and are "
            f"switched off: {instead}. {verdict.why}. Please report this sentence together with "
            "the output of `fusedseq info`; FUSEDSEQ_VERIFY=off uses the kernels regardless",
            RuntimeWarning,
            stacklevel=3,
        )
        if verdict.found != LOOP_ALONE:
            raise autograd.SwitchedOff(op)

    def switch_off(self, op: str) -> None:
        """Computes an operator by its oracle on the devices of this key, from now on."""
        found: dict[str, Callable[..., Any]] = {op: functools.partial(_oracle_kernel, op)}
        for name in (f"{op}_backward", *FURTHER.get(op, ())):
            if name in autograd._rules:  # a backward that is linear has an oracle of its own
                found[name] = functools.partial(_oracle_kernel, name)
            elif name in overloads:
                found[name] = functools.partial(_refuse, name)
        self.replaced.append(_registered(found, self.key))
        autograd.switched_off.add((op, self.key.lower()))
        autograd.stop_recording_in_cpp()
        # The gradient of a linear operator is a call of operators, which are replaced themselves.
        if op in autograd._rules and not autograd._rules[op].gradient.is_linear:
            _differentiate_by_oracle(autograd._rules[op], self.key.lower())


def _registered(
    functions: dict[str, Callable[..., Any]], key: str, with_keyset: bool = False
) -> torch.library.Library:
    library = torch.library.Library("fusedseq", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns that kernels are replaced
        for op, function in functions.items():
            library.impl(op, function, key, with_keyset=with_keyset, allow_override=True)
    return library


def _differentiate_by_oracle(rule: Rule, device_type: str) -> None:
    """Computes an operator's gradients by its oracle on devices of a type, from now on."""
    by_kernels = rule.compute

    def compute(named: Named, grads: Gradients, needed: frozenset[str]) -> Gradients:
        tensors = [t for t in (*named.values(), *grads.values()) if isinstance(t, Tensor)]
        if tensors[0].device.type != device_type:
            return by_kernels(named, grads, needed)
        found = rule.through_oracle(named, grads, needed)
        return {name: None if g is None else g.detach() for name, g in found.items()}

    rule.compute = compute


def _cannot_compare(device: torch.device) -> bool:
    if torch._C._current_graph_task_id() != -1 or is_comparing():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _restarts() -> bool:
    """Whether a function around this one makes the call again after SwitchedOff."""
    frame = sys._getframe()
    while frame:
        if frame.f_code in autograd.restarting:
            return True
        frame = frame.f_back
    return False


def _oracle_kernel(op: str, *inputs: Any) -> Any:
    """The results of an operator by its oracle, in the layout that the operator declares. Outputs
    that only a backward kernel reads are zero.
    """
    schema = overloads[op]._schema
    named = {a.name: value for a, value in zip(schema.arguments, inputs, strict=True)}
    device = next(t.device for t in inputs if isinstance(t, Tensor))
    with torch.autocast(device.type, enabled=False):
        if op in ORACLES:
            found = {schema.returns[0].name: ORACLES[op](named)}
        elif op in autograd._rules:
            found = autograd._rules[op].by_oracle(named)
        else:
            found = {schema.returns[0].name: call_reference(getattr(reference, op), named)}
    on_meta = [t.to("meta") if isinstance(t, Tensor) else t for t in inputs]
    declared = overloads[op](*on_meta)
    declared = declared if isinstance(declared, tuple) else (declared,)
    outputs = []
    for output, like in zip(schema.returns, declared, strict=True):
        result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        value = found.get(output.name)
        outputs.append(result.zero_() if value is None or not like.numel() else result.copy_(value))
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _refuse(op: str, *_: Any) -> Any:
    raise RuntimeError(
        f"{op}: the kernels of this operator disagree with the oracle on this GPU and were "
        "switched off after the call was recorded whose gradient is computed here; make the call "
        "again, and after torch.compile call torch.compiler.reset() before"
    )


def install() -> Guards | None:
    """Guards the operators of a build with CUDA, as FUSEDSEQ_VERIFY says.

    Errors: ValueError for another value of the variable
    """
    mode = _load.variable("FUSEDSEQ_VERIFY", "off", "first", "always") or "first"
    if mode == "off" or torch.version.cuda is None:
        return None
    guards = Guards(always=mode == "always")
    guards.install()
    return guards
