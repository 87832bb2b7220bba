"""Lists the kernels that the calls of a GPU case launch, and how long each takes on the device.

python -m bench.gpu.kernels RE [--providers fused eager] [--calls 5] [--device cuda]

RE selects cases of bench/gpu/cases.py by name. The times are those of torch's profiler, in
microseconds per call, forward and backward together; kernels of one name are added. With --device
cpu the operators of small cases are listed in place of kernels, as a rehearsal.
"""

import argparse
import re

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.cases import gpu_cases
from bench.suite import roofline
from bench.suite.report import markdown_table

HEAD = ("kernel", "launches", "µs", "share")
LONGEST = 100  # characters of a kernel's name


def kernel_times(call, calls, device):
    """Returns [(kernel, launches per call, microseconds per call)], the longest first."""
    is_cuda = torch.device(device).type == "cuda"
    for _ in range(3):
        call()
    roofline.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        for _ in range(calls):
            call()
        roofline.synchronize(device)
    time = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    rows = [(e.key, e.count / calls, getattr(e, time) / calls) for e in found.key_averages()]
    return sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])


def table(rows):
    total = sum(microseconds for _, _, microseconds in rows)
    lines = [
        (name[:LONGEST], f"{launches:g}", f"{microseconds:.1f}", f"{microseconds / total:.0%}")
        for name, launches, microseconds in rows
    ]
    launches = sum(launches for _, launches, _ in rows)
    return markdown_table([HEAD, *lines, ("all", f"{launches:g}", f"{total:.1f}", "")])


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.kernels", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("cases", metavar="RE", help="a regular expression of the cases' names")
    parser.add_argument("--providers", nargs="+", default=["fused", "eager"])
    parser.add_argument("--calls", type=int, default=5, help="profiled calls (default: 5)")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    rehearsal = torch.device(args.device).type != "cuda"
    cases = [case for case in gpu_cases(rehearsal) if re.search(args.cases, case.name)]
    if not cases:
        parser.error(f"no case has a name like {args.cases!r}")
    for case in cases:
        inputs = case.benchmark.inputs(args.device)
        for name, function in case.providers().items():
            if name in args.providers:
                call = roofline.bind(function, *inputs, case.benchmark.backward)
                print(f"\n{case.name}: {name}\n")
                print(table(kernel_times(call, args.calls, args.device)), flush=True)


if __name__ == "__main__":
    main()
