"""One group of bench/gpu_cases.py, timed: python -m bench.gpu GROUP --out FILE [--device cuda] [--seconds S] [--warm]

Raw times go into FILE, which is written anew after each row, so that a process that dies loses one row. --warm times nothing:
every provider is compiled and called, after which the compilers' caches on disk have what the timing needs.
GROUP "ceilings": what the card can do, measured; nothing of ours.
"""

import argparse
import gc
import json
import sys
import time
import warnings
from pathlib import Path
from statistics import median

import torch
from fusedseq import fused

from bench import gpu_cases, gpu_timing, machine, roofline, suite

COMPILERS = "compiled", "flex"  # the providers that torch.compile makes


def prepare(case, inputs, compile_seconds):
    """({provider: its call, called}, {provider: why it was left out})."""
    calls, left_out = {}, {}
    for name, function in case.providers().items():
        if name in COMPILERS and not compile_seconds:
            left_out[name] = "not asked for"
            continue
        budget = suite.AtMost(compile_seconds or 60)
        call = roofline.bound(function, *inputs, case.row.backward)
        try:
            with budget, warnings.catch_warnings(action="ignore"):
                call()
            calls[name] = call
        except Exception as error:  # a peer that cannot do this call
            left_out[name] = f"not in {compile_seconds:.0f} s" if budget.over else sentence(error)
    return calls, left_out


def sentence(error):
    """The first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def captured(calls, clock, left_out):
    """{provider: the replay of its graph} of those that can be captured."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = clock.graph(call)
        except Exception as error:
            left_out[f"{name} as a graph"] = sentence(error)
    return graphs


def timed(case, device, seconds, compile_seconds):
    """The row of the result."""
    row = {"name": case.name, "op": case.row.op, "mode": case.row.mode, "dtype": str(case.row.dtype)[6:]}
    torch.manual_seed(0)
    torch.compiler.reset()
    gc.collect()  # graphs of the row before hold memory
    torch.cuda.empty_cache()
    inputs = case.row.inputs(device)
    clock = gpu_timing.clock(device)
    if case.row.call is None:
        row["explain"] = fused.explain(case.row.op, *inputs[0], **inputs[1])
    row["error"] = max([0.0, suite.check(case.row, *inputs)]) if checked(case, inputs) else None
    calls, row["left out"] = prepare(case, inputs, compile_seconds)
    row["memory"] = {name: roofline.peak_memory(calls[name], device) for name in ("fused", "eager") if name in calls}
    times = gpu_timing.time_all(calls, captured(calls, clock, row["left out"]), clock, seconds)
    row["times"] = {name: {way: {"median": median(ts), "least": min(ts), "most": max(ts), "rounds": len(ts)}
                           for way, ts in by.items()} for name, by in times.items()}  # fmt: skip
    return row


def checked(case, inputs):
    return not case.row.parts or case.row.parts(*inputs)


def warm(case, device, compile_seconds):
    _, left_out = prepare(case, case.row.inputs(device), compile_seconds)
    return {"name": case.name, "left out": left_out}


def ceilings(device, rehearsal):
    """Bytes a second of a copy larger than the L2, FLOP/s of products of random numbers, and what an empty measurement
    of events shows."""
    clock, n, size = gpu_timing.clock(device), 64 if rehearsal else 8192, 1 << (16 if rehearsal else 31)
    source, found = torch.randn(size // 4, device=device).view(torch.uint8), {}
    target = torch.empty_like(source)
    found["copy"] = 2 * size / median(clock.seconds(lambda: target.copy_(source), 12)[2:])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        found[str(dtype)[6:]] = 2 * n**3 / median(clock.seconds(lambda a=a, b=b: a @ b, 12)[2:])
    found["events"] = median(clock.seconds(lambda: None, 50))
    if torch.device(device).type == "cuda":
        p = torch.cuda.get_device_properties()
        found |= {"L2 bytes": p.L2_cache_size, "SMs": p.multi_processor_count, "memory bytes": p.total_memory}
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("group", choices=["ceilings", *gpu_cases.GROUPS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal, with small sizes")
    parser.add_argument("--seconds", type=float, default=40, help="of the whole group, compilation included")
    parser.add_argument(
        "--compile-seconds", type=float, default=60, help="longest first call of a provider; 0: nothing is compiled"
    )
    parser.add_argument("--warm", action="store_true", help="compile everything, time nothing")
    args = parser.parse_args(argv)
    end, rehearsal = time.monotonic() + args.seconds, torch.device(args.device).type != "cuda"
    document = {"rows": [], "failed": {}}

    def write():
        args.out.write_text(json.dumps(document, indent=1) + "\n")

    if args.group == "ceilings":
        document = {"ceilings": ceilings(args.device, rehearsal), "facts": machine.facts(args.device)}
        return write()
    cases = [case for case in gpu_cases.listed(rehearsal) if case.group == args.group]
    for i, case in enumerate(cases):
        left = end - time.monotonic()
        print(f"{case.name}: {left:.0f} s left", flush=True)
        if left <= 0:
            document["failed"][case.name] = "no time was left"
            continue
        try:
            limit = min(args.compile_seconds, max(1.0, left))
            document["rows"].append(
                warm(case, args.device, limit) if args.warm else
                timed(case, args.device, 0.3 * left / (len(cases) - i), limit)
            )  # fmt: skip
        except Exception as error:
            document["failed"][case.name] = sentence(error)
            print(f"{case.name}: {sentence(error)}", flush=True)
            if "CUDA error" in str(error):  # no later call would work
                document["failed"] |= {c.name: "after a CUDA error" for c in cases[i + 1 :]}
                write()
                return 1
        write()
    write()
    return int(bool(document["failed"]))


if __name__ == "__main__":
    sys.exit(main())
