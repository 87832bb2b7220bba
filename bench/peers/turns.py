"""Times calls of several libraries in one process, in interleaved rounds.

Each library has threads of its own, which spin for a while after a call and would take a core from
the next library. So a provider's turn begins when all threads of the process sleep, and an untimed
call wakes its own. Short calls are repeated within a turn.
"""

import gc
import time
from collections import deque
from statistics import median

from bench.suite import machine

MAX_ROUNDS, MIN_ROUNDS = 101, 5
TURN = 0.005  # seconds that a turn takes at least
LONG = 0.1  # a call of more seconds needs no other before it that wakes the threads
IDLE = 0.004  # seconds over which the threads of the process are observed
ASLEEP = 0.05  # the part of IDLE that they may compute
MOST_WAITING = 2.0  # seconds


def wait_for_threads():
    """Returns when the process has used no CPU time for a moment, or after MOST_WAITING."""
    end = time.perf_counter() + MOST_WAITING
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(IDLE)
        if time.process_time() - before < ASLEEP * IDLE:
            return


def seconds(call, repeats=1):
    """Returns how long a call takes, the mean of `repeats` calls in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def take_turn(call, once):
    """Returns how long a call takes that took `once` seconds before."""
    wait_for_threads()
    if once < LONG:
        call()
    return seconds(call, max(1, round(TURN / once)))


def time_rounds(calls, measuring_seconds):
    """Times all calls in turns; in each round every call has one.

    calls: {provider: a call without arguments}
    measuring_seconds: of all rounds together, unless MIN_ROUNDS take longer
    Returns {provider: [seconds]}, and the number of cores that other processes used.
    """
    once = {}
    for name, call in calls.items():
        call()
        once[name] = seconds(call)
    start = time.perf_counter()
    for name, call in calls.items():
        take_turn(call, once[name])
    rounds = measuring_seconds / (time.perf_counter() - start)
    times = {name: [] for name in calls}
    order = deque(calls)
    neighbours = machine.Neighbours()
    gc.collect()
    gc.disable()
    try:
        for _ in range(min(MAX_ROUNDS, max(MIN_ROUNDS, int(rounds)))):
            for name in order:
                times[name].append(take_turn(calls[name], once[name]))
            # The order rotates, so that no call always has the same predecessor.
            order.rotate()
    finally:
        gc.enable()
    return times, neighbours.busy()


def timed(calls, measuring_seconds):
    """Returns the entries of a result's row that `time_rounds` measures."""
    times, busy = time_rounds(calls, measuring_seconds)
    return {
        "rounds": {name: [round(t, 8) for t in ts] for name, ts in times.items()},
        "median": {name: median(ts) for name, ts in times.items()},
        "others busy": busy,
    }
