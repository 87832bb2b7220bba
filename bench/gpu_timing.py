"""How long a call takes on a GPU: by CUDA events around it, as it is called and replayed as a graph, with the L2 warm
and cold. `Rehearsal` has the same methods on a CPU, where there is no graph and events are a clock.
"""

import time

import torch

WAYS = ("call", "graph", "cold")  # called back to back; its graph back to back; its graph after the L2 was overwritten


class Gpu:
    turns, least = 4, 5

    def __init__(self):
        properties = torch.cuda.get_device_properties()
        self.flushed = torch.empty(4 * properties.L2_cache_size, dtype=torch.uint8, device="cuda")

    def graph(self, call):
        """A replay of the call. RuntimeError where it cannot be captured."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()
        return lambda kept=kept: graph.replay()  # what it writes must stay allocated

    def seconds(self, call, rounds, cold=False):
        """[the time of each of `rounds` calls], queued one behind the other."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        for start, end in events:
            if cold:
                self.flushed.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


class Rehearsal:
    turns, least = 1, 1

    def __init__(self):
        self.flushed = torch.empty(1 << 20, dtype=torch.uint8)

    def graph(self, call):
        return call

    def seconds(self, call, rounds, cold=False):
        times = []
        for _ in range(rounds):
            if cold:
                self.flushed.zero_()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times


def clock(device):
    return Gpu() if torch.device(device).type == "cuda" else Rehearsal()


def rounds_in(seconds, once, least, most=200):
    """How often something that takes `once` can be timed within `seconds`; at least and at most so often."""
    return max(least, min(most, int(seconds / max(once, 1e-6))))


def time_all(calls, graphs, clock, seconds):
    """{provider: {way: [seconds]}}: every provider in each of its ways, a few turns each so that a change of the card's
    clock meets all of them. `graphs` has those that could be captured."""
    found = {name: {} for name in calls}
    ways = [(name, "call", call) for name, call in calls.items()]
    ways += [(name, way, replay) for name, replay in graphs.items() for way in ("graph", "cold")]
    share = seconds / len(ways) / clock.turns
    for name, way, call in ways:
        once = clock.seconds(call, 2, way == "cold")[-1]  # the first is a warm-up
        found[name][way] = [], rounds_in(share, once, clock.least)
    for _ in range(clock.turns):
        for name, way, call in ways:
            times, rounds = found[name][way]
            times += clock.seconds(call, rounds, way == "cold")
    return {name: {way: times for way, (times, _) in by.items()} for name, by in found.items()}
