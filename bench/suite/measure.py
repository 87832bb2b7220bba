"""The measurement: one pytest test per benchmark case; every provider is timed once per round.

pytest-benchmark times `fused`. The case's other providers and the call that gives its roofline
limit run once each in the setup of every round, which pytest-benchmark does not time, under the
same clock. All of them therefore see the same machine, whatever else is running on it. With
`--mkl both` this includes the baselines in a second process, in which MKL is unthrottled.
"""

import gc
import signal
from collections import deque
from contextlib import contextmanager
from statistics import median

import pytest
import torch
from fusedseq import testing

from bench.suite import (
    accelerated_models,
    encoder_layers,
    machine,
    optimizers,
    quantized_weights,
    report,
    roofline,
    second_process,
)
from bench.suite.case import OptimizerStepCase

MAX_ROUNDS, MIN_ROUNDS = 101, 5


def test_case(case, benchmark, session):
    torch.manual_seed(0)
    # torch.compile stops recompiling a function after eight shapes, so no case may inherit shapes.
    torch.compiler.reset()
    session.announce(case)
    args, kwargs = case.inputs(session.device)
    try:
        error = check(case, args, kwargs)
    except NotImplementedError as reason:
        if session.device == "cpu":  # the CPU has a kernel for every case
            raise
        session.no_kernel.append(case.name)
        session.say("no kernel for this device")
        pytest.skip(str(reason).split("\n")[0])
    session.say(f"correct (error {error:.0%} of the error budget)", end="")
    if not hasattr(benchmark, "stats"):
        run_under_codspeed(case, args, kwargs, benchmark, session)
        return

    calls, left_out = prepare(case, args, kwargs, session)
    calls |= session.calls_with_mkl_unthrottled(case)
    limit = None
    if case.roofline != "gemm":
        calls["roof"], moved = roofline.bandwidth_call(case, session.device, case.dtype)
        limit = {"name": f"torch {case.roofline}", "bytes": moved}
    session.measure_gemm_rates(case.dtype)

    times, busy, exchanges = time_rounds(calls, benchmark, session)
    if limit:
        limit["rounds"] = times.pop("roof")
        del calls["roof"]
    entry = {
        "name": case.name,
        "op": case.op,
        "mode": case.mode,
        "dtype": str(case.dtype)[6:],
        "error": error,
        "rounds": {name: [round(t, 8) for t in ts] for name, ts in times.items()},
        "median": {name: median(ts) for name, ts in times.items()},
        "memory": {
            name: memory(calls[name], median(ts), session.device)
            for name, ts in times.items()
            if not isinstance(calls[name], second_process.Call)
        },
        "flops": case.flops * (3 if case.backward else 1),
        "bytes": case.traffic * case.dtype.itemsize,
        "roof": limit,
        "others busy": busy,
        "line exchange": exchanges,
        "left out": left_out,
        "bars": [[target.against, target.value] for target in case.targets]
        if session.device == "cpu"
        else [],
    }
    benchmark.extra_info.update(entry)
    session.entries.append(entry)
    medians = ", ".join(
        f"{name} {report.three_digits(t * 1e3)} ms" for name, t in entry["median"].items()
    )
    session.say(f"; {medians}; {len(times['fused'])} rounds")


def run_under_codspeed(case, args, kwargs, benchmark, session):
    """Lets pytest-codspeed measure `fused`, and nothing else.

    `pytest --codspeed` replaces pytest-benchmark's fixture by its own, which returns no times: it
    compares a call with the same call at an earlier commit, not with a baseline, and does so on
    instructions that are counted, or on the clock. So the case has no entry in the report.
    """
    fused = roofline.bind(case.providers(session.full)["fused"], args, kwargs, case.backward)

    def measured():
        fused()
        roofline.synchronize(session.device)

    benchmark.pedantic(measured, rounds=MIN_ROUNDS, warmup_rounds=1)
    session.say("; measured by pytest-codspeed")


def time_rounds(calls, benchmark, session):
    """Times all calls in interleaved rounds.

    Returns {provider: [seconds]}, `fused` first, the number of cores that other processes used,
    and the nanoseconds of a cache line from core to core, now and then between rounds.
    """
    fused = calls["fused"]
    # The order rotates by one after each round, so that no call always has the same predecessor.
    remote = [name for name, call in calls.items() if isinstance(call, second_process.Call)]
    order = deque(name for name in calls if name != "fused" and name not in remote)
    times = {name: [] for name in (*order, *remote)}
    exchanges = session.line_exchange.every(0.3)

    def time_others():
        # pytest-benchmark does so while it times `fused`.
        with without_garbage_collection():
            time_others_now()

    def time_others_now():
        # The second process has its turn at the start of a round, and now and then the exchange. An
        # untimed call then wakes the threads of this process: the first call after a pause takes up
        # to some milliseconds more.
        paused = exchanges.measure()
        for name in remote:
            times[name].append(calls[name].seconds())
        if remote or paused:
            fused()
        for name in order:
            times[name].append(roofline.seconds(calls[name], session.device))
        order.rotate()

    once = roofline.seconds(fused, session.device)
    time_others()
    rounds = int(session.seconds / (once + sum(t.pop() for t in times.values())))
    neighbours = machine.Neighbours(session.second and session.second.pid)

    def timed():
        fused()
        roofline.synchronize(session.device)

    benchmark.pedantic(timed, setup=time_others, rounds=min(MAX_ROUNDS, max(MIN_ROUNDS, rounds)))
    fused_times = list(benchmark.stats.stats.data)
    return {"fused": fused_times, **times}, neighbours.busy(), exchanges.times


@contextmanager
def without_garbage_collection():
    """Python's garbage collector does not run in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check(case, args, kwargs):
    """Asserts that `fused` agrees with the oracle on the inputs that are going to be timed.

    Returns the largest error as a fraction of the error budget.
    """
    if isinstance(case, OptimizerStepCase):
        return optimizers.check(args)
    if isinstance(case, encoder_layers.EncoderLayerCase):
        return encoder_layers.check(case, args)
    if isinstance(case, accelerated_models.AcceleratedModelCase):
        return accelerated_models.check(case, args)
    if isinstance(case, quantized_weights.QuantizedCase):
        return quantized_weights.check(case, args)
    parts = case.parts(args, kwargs) if case.parts else [(case.op, args, kwargs)]
    return max(testing.check(op, a, k, backward=case.backward) for op, a, k in parts)


def prepare(case, args, kwargs, session):
    """Returns {provider: a call without arguments} and {provider: the reason why it is left out}.

    Every returned call has been called at least once, so that compilation is over.
    """
    calls, left_out = {}, {}
    for name, function in case.providers(session.full).items():
        call = roofline.bind(function, args, kwargs, case.backward)
        if not name.startswith("compiled"):
            call()
        elif not session.compile_seconds:
            left_out[name] = "not requested"
            continue
        elif reason := compile_failure(call, session.compile_seconds):
            left_out[name] = reason
            session.say(f"; {name}: {reason}", end="")
            continue
        calls[name] = call
    return calls, left_out


def compile_failure(call, limit):
    """Calls a compiled function twice; returns why it cannot be used, or None."""
    deadline = Deadline(limit)
    try:
        with deadline:
            call()
    except Exception as error:
        if deadline.exceeded:
            return f"did not compile in {limit:g} s"
        return f"does not compile: {type(error).__name__}"
    call()
    return None


def memory(call, once, device):
    """Returns the peak memory of one call; of short calls the least of three.

    The process itself allocates a little now and then, which would blur a small call's peak.
    """
    peaks = [roofline.peak_memory(call, device) for _ in range(3 if once < 0.1 else 1)]
    return None if None in peaks else min(peaks)


class Deadline:
    """Interrupts its `with` block after `limit` seconds, since torch.compile has no time limit.

    `exceeded` says whether it did: the compiler may wrap the TimeoutError into an error of its own.
    """

    def __init__(self, limit):
        self.limit, self.exceeded = limit, False

    def __enter__(self):
        self.previous_handler = signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, self.limit)

    def _interrupt(self, signum, frame):
        self.exceeded = True
        raise TimeoutError

    def __exit__(self, *error):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.previous_handler)
