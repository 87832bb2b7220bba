"""Measures calls on a GPU with CUDA events: as they are called, and as replays of their CUDA graph.

`CpuRehearsal` has the same methods on a CPU, where calls stand for graphs and a clock stands for
events.
"""

import time

import torch

# How a call is timed: calls queued back to back; replays of its graph back to back; replays of its
# graph, each after the L2 cache was overwritten.
WAYS = ("call", "graph", "cold")


class CudaTimer:
    turns, least_rounds = 4, 5

    def __init__(self):
        properties = torch.cuda.get_device_properties()
        # Writing four times the capacity of the L2 cache evicts all of its lines.
        self.evicting = torch.empty(4 * properties.L2_cache_size, dtype=torch.uint8, device="cuda")

    def graph(self, call):
        """Returns a replay of the call's graph; RuntimeError if it cannot be captured."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = call()
        return lambda outputs=outputs: graph.replay()  # the graph's outputs must stay allocated

    def seconds(self, call, rounds, cold=False):
        """Returns the times of `rounds` calls, which are queued one after the other."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        for start, end in events:
            if cold:
                self.evicting.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


class CpuRehearsal:
    turns, least_rounds = 1, 1

    def __init__(self):
        self.evicting = torch.empty(1 << 20, dtype=torch.uint8)

    def graph(self, call):
        return call

    def seconds(self, call, rounds, cold=False):
        times = []
        for _ in range(rounds):
            if cold:
                self.evicting.zero_()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times


def timer(device):
    return CudaTimer() if torch.device(device).type == "cuda" else CpuRehearsal()


LONG = 0.02  # seconds of a call of which one in a turn is enough


def rounds_within(seconds, once, least, most=200):
    """Returns how many calls of `once` seconds fit into `seconds`, from `least` to `most`; of long
    calls at least one."""
    return max(1 if once > LONG else least, min(most, int(seconds / max(once, 1e-6))))


def time_all(calls, graphs, timer, seconds):
    """Times every provider in each of the WAYS; returns {provider: {way: [seconds]}}.

    Each gets a few turns, so that a change of the GPU's clock affects all of them alike.
    graphs: {provider: the replay of its graph}, of those that could be captured
    """
    plan = [(name, "call", call) for name, call in calls.items()]
    plan += [(name, way, replay) for name, replay in graphs.items() for way in ("graph", "cold")]
    share = seconds / len(plan) / timer.turns
    rounds = {}
    for name, way, call in plan:
        once = timer.seconds(call, 2, way == "cold")[-1]  # the first call is a warm-up
        rounds[name, way] = rounds_within(share, once, timer.least_rounds)
    times = {name: {} for name in calls}
    for _ in range(timer.turns):
        for name, way, call in plan:
            times[name].setdefault(way, []).extend(
                timer.seconds(call, rounds[name, way], way == "cold")
            )
    return times
