"""Times one group of bench/gpu/cases.py.

python -m bench.gpu.measure GROUP --out FILE [--device cuda] [--seconds S] [--cases RE] [--warm]

The times go into FILE, which is written again after each case, so that a process that dies loses
one case. With --warm nothing is timed: every provider is compiled and called, and the compilers'
caches on disk then contain what the timing needs. GROUP "ceilings" measures what the GPU can do,
and nothing of ours.
"""

import argparse
import gc
import json
import re
import sys
import time
import warnings
from pathlib import Path
from statistics import median

import torch
from fusedseq import fused

from bench.gpu import cases as gpu_cases
from bench.gpu import timing
from bench.suite import machine, measure, roofline

COMPILED = "compiled", "flex"  # the providers that torch.compile makes


def prepare(case, inputs, compile_seconds):
    """Returns {provider: its call} after one call each, and {provider: why it is left out}."""
    calls, left_out = {}, {}
    for name, function in case.providers().items():
        if name in COMPILED and not compile_seconds:
            left_out[name] = "not requested"
            continue
        deadline = measure.Deadline(compile_seconds or 60)
        call = roofline.bind(function, *inputs, case.benchmark.backward)
        try:
            with deadline, warnings.catch_warnings(action="ignore"):
                call()
            calls[name] = call
        except Exception as error:  # a peer that cannot do this call
            too_late = f"not in {compile_seconds:.0f} s"
            left_out[name] = too_late if deadline.exceeded else first_line(error)
    return calls, left_out


def first_line(error):
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def capture_graphs(calls, timer, left_out):
    """Returns {provider: the replay of its graph} of the calls that can be captured."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = timer.graph(call)
        except Exception as error:
            left_out[f"{name} as a graph"] = first_line(error)
    return graphs


def measure_case(case, device, seconds, compile_seconds):
    """Returns the case's entry of the result."""
    benchmark = case.benchmark
    entry = {
        "name": case.name,
        "op": benchmark.op,
        "mode": benchmark.mode,
        "dtype": str(benchmark.dtype)[6:],
    }
    torch.manual_seed(0)
    torch.compiler.reset()
    gc.collect()  # the graphs of the previous case hold memory
    torch.cuda.empty_cache()
    inputs = benchmark.inputs(device)
    timer = timing.timer(device)
    if benchmark.call is None:
        entry["explain"] = fused.explain(benchmark.op, *inputs[0], **inputs[1])
    has_oracle = not benchmark.parts or benchmark.parts(*inputs)
    entry["error"] = max([0.0, measure.check(benchmark, *inputs)]) if has_oracle else None
    calls, entry["left out"] = prepare(case, inputs, compile_seconds)
    entry["memory"] = {
        name: roofline.peak_memory(calls[name], device)
        for name in ("fused", "eager")
        if name in calls
    }
    graphs = capture_graphs(calls, timer, entry["left out"])
    times = timing.time_all(calls, graphs, timer, seconds)
    entry["times"] = {
        name: {
            way: {"median": median(ts), "least": min(ts), "most": max(ts), "rounds": len(ts)}
            for way, ts in by_way.items()
        }
        for name, by_way in times.items()
    }
    return entry


def warm_case(case, device, compile_seconds):
    """Compiles and calls every provider of a case, without timing."""
    _, left_out = prepare(case, case.benchmark.inputs(device), compile_seconds)
    return {"name": case.name, "left out": left_out}


def measure_ceilings(device, rehearsal):
    """Measures what the GPU can do.

    Returns bytes per second of a copy larger than the L2 cache, FLOP/s of products of random
    numbers, and the time that two events report with nothing between them.
    """
    timer = timing.timer(device)
    n, size = (64, 1 << 16) if rehearsal else (8192, 1 << 31)
    source, found = torch.randn(size // 4, device=device).view(torch.uint8), {}
    target = torch.empty_like(source)
    found["copy"] = 2 * size / median(timer.seconds(lambda: target.copy_(source), 12)[2:])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        found[str(dtype)[6:]] = 2 * n**3 / median(timer.seconds(lambda a=a, b=b: a @ b, 12)[2:])
    found["events"] = median(timer.seconds(lambda: None, 50))
    if torch.device(device).type == "cuda":
        p = torch.cuda.get_device_properties()
        found |= {
            "L2 bytes": p.L2_cache_size,
            "SMs": p.multi_processor_count,
            "memory bytes": p.total_memory,
        }
    return found


def measure_group(args, result, write):
    """Measures or warms a group's cases; returns whether the process can still use the GPU."""
    end = time.monotonic() + args.seconds
    rehearsal = torch.device(args.device).type != "cuda"
    cases = [
        case
        for case in gpu_cases.gpu_cases(rehearsal)
        if case.group == args.group and re.search(args.cases, case.name)
    ]
    for i, case in enumerate(cases):
        left = end - time.monotonic()
        print(f"{case.name}: {left:.0f} s left", flush=True)
        if left <= 0:
            result["failed"][case.name] = "no time was left"
            continue
        limit = min(args.compile_seconds, max(1.0, left))
        share = 0.3 * left / (len(cases) - i)  # correctness and compilation need the rest
        try:
            entry = (
                warm_case(case, args.device, limit)
                if args.warm
                else measure_case(case, args.device, share, limit)
            )
            result["rows"].append(entry)
        except Exception as error:
            result["failed"][case.name] = first_line(error)
            print(f"{case.name}: {first_line(error)}", flush=True)
            if "CUDA error" in str(error):  # every later call in this process would fail
                result["failed"] |= {c.name: "after a CUDA error" for c in cases[i + 1 :]}
                return False
        write()
    return True


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.measure", description=__doc__.split("\n")[0]
    )
    parser.add_argument("group", choices=["ceilings", *gpu_cases.GROUPS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal with small sizes")
    parser.add_argument(
        "--seconds",
        type=float,
        default=40,
        help="time limit of the group, compilation included (default: %(default)s)",
    )
    parser.add_argument(
        "--compile-seconds",
        type=float,
        default=60,
        help="time limit of a provider's first call; 0: compile nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--cases",
        default="",
        metavar="RE",
        help="only the cases whose names contain this regular expression",
    )
    parser.add_argument("--warm", action="store_true", help="compile everything, time nothing")
    args = parser.parse_args(argv)
    result = {"rows": [], "failed": {}}

    def write():
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    if args.group == "ceilings":
        rehearsal = torch.device(args.device).type != "cuda"
        ceilings = measure_ceilings(args.device, rehearsal)
        result = {"ceilings": ceilings, "facts": machine.facts(args.device)}
        write()
        return 0
    usable = measure_group(args, result, write)
    write()
    return int(bool(result["failed"]) or not usable)


if __name__ == "__main__":
    sys.exit(main())
