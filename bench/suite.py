"""The benchmark: one test for a row of bench/cases.py, each provider timed once in every round.

pytest-benchmark times `fused`; in the setup of each of its rounds, which it doesn't time, the row's other providers
and its roof run once each under the same clock. So all see the same machine, whatever else goes on there.
"""

import signal
import time
from collections import deque
from statistics import median

import pytest
import torch
from fusedseq import testing

from bench import machine, optimizers, report, roofline
from bench.cases import StepRow

MAX_ROUNDS, MIN_ROUNDS = 101, 5


def test_row(row, benchmark, session):
    torch.manual_seed(0)
    torch.compiler.reset()  # so that no shape is the 9th of its function, which torch.compile would not take
    session.say(f"[{session.next()}/{session.total}] {row.name} ({row.mode}): ", end="")
    args, kwargs = row.inputs(session.device)
    try:
        worst = check(row, args, kwargs)
    except NotImplementedError as error:
        if session.device == "cpu":  # which has a kernel for every row
            raise
        session.no_kernel.append(row.name)
        session.say("no kernel for this device")
        pytest.skip(str(error).split("\n")[0])
    session.say(f"right (error {worst:.0%} of what is allowed)", end="")

    calls, left_out = start(row, args, kwargs, session)
    roof = None
    if row.roof != "gemm":
        calls["roof"], moved = roofline.bandwidth_roof(row, session.device, row.dtype)
        roof = {"name": f"torch {row.roof}", "bytes": moved}
    session.gemm_rates(row.dtype)

    fused = calls.pop("fused")
    times = {name: [] for name in calls}
    turn = deque(calls)  # turned on by one in each round: nobody is always next to the same neighbour

    def others():
        for name in turn:
            times[name].append(seconds(calls[name], session.device))
        turn.rotate()

    once = seconds(fused, session.device)
    others()
    rounds = int(session.seconds / (once + sum(t.pop() for t in times.values())))
    neighbours = machine.Neighbours()

    def timed():
        fused()
        roofline.synchronize(session.device)

    benchmark.pedantic(timed, setup=others, rounds=min(MAX_ROUNDS, max(MIN_ROUNDS, rounds)))
    busy = neighbours.busy()
    times = {"fused": list(benchmark.stats.stats.data), **times}
    if roof:
        roof["rounds"] = times.pop("roof")
    calls["fused"] = fused
    result = {
        "name": row.name, "op": row.op, "mode": row.mode, "dtype": str(row.dtype)[6:], "error": worst,
        "rounds": {name: [round(t, 8) for t in ts] for name, ts in times.items()},
        "median": {name: median(ts) for name, ts in times.items()},
        "memory": {name: memory(calls[name], median(ts), session.device) for name, ts in times.items()},
        "flops": row.flops * (3 if row.backward else 1), "bytes": row.traffic * row.dtype.itemsize,
        "roof": roof, "others busy": busy, "left out": left_out,
        "bars": [[bar.against, bar.figure] for bar in row.bars] if session.device == "cpu" else [],
    }  # fmt: skip
    benchmark.extra_info.update(result)
    session.results.append(result)
    session.say("; " + ", ".join(f"{name} {report.three_digits(t * 1e3)} ms" for name, t in result["median"].items())
                + f"; {len(times['fused'])} rounds")  # fmt: skip


def check(row, args, kwargs):
    """Asserts that `fused` agrees with the oracle on the very inputs to be timed; its error over the one allowed."""
    if isinstance(row, StepRow):
        return optimizers.check(args)
    parts = row.parts(args, kwargs) if row.parts else [(row.op, args, kwargs)]
    return max(testing.check(op, a, k, backward=row.backward) for op, a, k in parts)


def start(row, args, kwargs, session):
    """{provider: a call without arguments}, each called once or more, and {provider: why it was left out}."""
    calls, left_out = {}, {}
    for name, function in row.providers(session.full).items():
        call = roofline.bound(function, args, kwargs, row.backward)
        if not name.startswith("compiled"):
            call()
        elif not session.compile_seconds:
            left_out[name] = "not asked for"
            continue
        else:
            budget = AtMost(session.compile_seconds)
            try:
                with budget:
                    call()
            except Exception as error:
                left_out[name] = (f"did not compile in {session.compile_seconds:g} s" if budget.over else
                                  f"does not compile: {type(error).__name__}")  # fmt: skip
                session.say(f"; {name}: {left_out[name]}", end="")
                continue
            call()
        calls[name] = call
    return calls, left_out


def memory(call, once, device):
    """The peak of one call, or the least of three short ones: a small one is blurred by what else the process touches."""
    peaks = [roofline.peak_memory(call, device) for _ in range(3 if once < 0.1 else 1)]
    return None if None in peaks else min(peaks)


def seconds(call, device):
    start = time.perf_counter()
    call()
    roofline.synchronize(device)
    return time.perf_counter() - start


class AtMost:
    """Interrupts its block after `limit` seconds, as a compiler has no budget of its own; `over`: whether it did.

    The compiler may wrap the TimeoutError into an error of its own.
    """

    def __init__(self, limit):
        self.limit, self.over = limit, False

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, self.late)
        signal.setitimer(signal.ITIMER_REAL, self.limit)

    def late(self, signum, frame):
        self.over = True
        raise TimeoutError

    def __exit__(self, *error):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)
