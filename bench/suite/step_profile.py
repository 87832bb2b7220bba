"""Where the time of a training step goes, in fusedseq and in PyTorch, on the CPU.

python -m bench.suite.step_profile [CASE ...] --data DATA [--mkl unthrottled] [--record]

The cases are presets at the sizes of the source reports, as bench.training.compare trains them, and
models before and after `accelerate`. Both steps of a case run under torch's profiler in turns; of
each, the profile with the median time counts.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path

import fusedseq
import torch
from fusedseq.fused import flops
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bench.suite import machine, measurements, mkl, roofline, step_shares
from bench.suite.case_list import CASES
from bench.training import compare
from bench.training.operator_sets import Run, prototype

ROOT = Path(__file__).parents[2]
BATCHES = 3  # different batches of a preset; a profile is of one step with each
BF16 = "-bfloat16"  # the end of the name of a case in bf16
PRESETS = (
    *compare.PRESETS["speed"],
    *(f"{name}{BF16}" for name in ("words/base", "en-es/base", "en-fr/base", "ptb/mogrifier-awd")),
)
MODELS = {case.name: case for case in CASES if case.op == "accelerate"}


def steps_of_preset(name, data, assignments=()):
    """Returns {side: a call that trains one step} of TASK/PRESET, with BF16 at its end or not."""
    preset, in_bf16 = name.removesuffix(BF16), name.endswith(BF16)
    more = compare.TASK_SETTINGS.get(preset.partition("/")[0], ())
    task, settings = compare.settings_of(preset, [*more, *assignments])
    task = prototype(task, settings, data, 0, "cpu")
    sets = {"fused": "fused", "baseline": "baselines"}
    return {side: Run(ops + ":bf16" * in_bf16, task, 0, BATCHES).step for side, ops in sets.items()}


def steps_of_model(case):
    """Returns {side: a call that computes loss and gradients} of a case of `accelerate`."""
    torch.manual_seed(0)
    args, kwargs = case.inputs("cpu")
    made = case.providers(full=True)
    sides = {"fused": "fused", "baseline": "torch"}
    return {side: roofline.bind(made[name], args, kwargs, True) for side, name in sides.items()}


def seconds(step):
    """Returns how long a step takes, as the mean of BATCHES steps."""
    begin = time.perf_counter()
    for _ in range(BATCHES):
        step()
    return (time.perf_counter() - begin) / BATCHES


def profiled(step):
    """Returns {group: milliseconds} of a step, as the mean of BATCHES steps."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        wall = seconds(step)
    microseconds = {e.key: e.self_cpu_time_total / BATCHES for e in found.key_averages()}
    ms = {name: t / 1e3 for name, t in microseconds.items()}
    return step_shares.grouped(ms, wall * 1e3)


class Operations(TorchDispatchMode):
    """Counts the floating point operations of products in `count`, without those of attention.

    torch's FlopCounterMode does not, because its hooks of modules refuse torch.autograd.grad.
    """

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        operator = function.overloadpacket
        is_product = step_shares.group(operator._qualified_op_name) == "products"
        if is_product and operator in flop_registry:
            self.count += flop_registry[operator](*args, **(kwargs or {}), out_val=out)
        return out


def operations(step):
    """Returns the floating point operations of a step's products, as the mean of BATCHES steps."""
    flops.register()
    with Operations() as counter:
        seconds(step)
    return counter.count / BATCHES


def measure(name, steps, rounds):
    """Returns the row of a case; steps: {side: call}"""
    dtype = torch.bfloat16 if name.endswith(BF16) else torch.float32
    for step in steps.values():
        seconds(step)  # a warm-up
    count = operations(steps["fused"])
    neighbours = machine.Neighbours()
    rate = max(roofline.gemm_rates("cpu", dtype).values())
    plain = {side: seconds(step) for side, step in steps.items()}
    found = {side: [] for side in steps}
    for _ in range(rounds):
        for side, step in steps.items():
            found[side].append(profiled(step))
    row = {"dtype": str(dtype)[6:], "operations": count, "rate": rate}
    for side, profiles in found.items():
        middle = sorted(profiles, key=lambda ms: sum(ms.values()))[len(profiles) // 2]
        row[side] = {"ms": middle, "without the profiler": plain[side] * 1e3}
    row["limit"] = step_shares.limits(row, step_shares.gain(row))
    return row | {"others busy": neighbours.busy()}


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m bench.suite.step_profile", description=__doc__.split("\n")[0]
    )
    names = [*PRESETS, *MODELS]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: {', '.join(names)}")
    parser.add_argument(
        "--data", help="the data's directory, or 'synthetic' (default: $FUSEDSEQ_DATA)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="profiles of each step (3)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--record", action="store_true", help="write into bench/results")
    mkl.add_argument(parser)
    args = parser.parse_args(argv)
    if unknown := {*args.cases} - {*names}:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    args.cases = args.cases or names
    return args


def main(argv=None):
    args = parse(argv)
    if args.mkl == "unthrottled" and not mkl.is_unthrottled():
        return mkl.run_preloaded("bench.suite.step_profile", sys.argv[1:] if argv is None else argv)
    result = {**machine.facts("cpu"), "mkl": args.mkl, "step profile": True, "rows": {}}
    folder = measurements.RESULTS if args.record else args.out
    folder.mkdir(parents=True, exist_ok=True)
    parts = [machine.slug(result, "cpu"), "step-profile", mkl.suffix(args.mkl)]
    path = folder / ("-".join(filter(None, parts)) + ".json")
    for name in args.cases:
        model = MODELS.get(name)
        steps = steps_of_model(model) if model else steps_of_preset(name, args.data)
        row = result["rows"][name] = measure(name, steps, args.rounds)
        limits = ", ".join(f"{value:.2f} ({limit})" for limit, value in row["limit"].items())
        print(f"{name}: gain {step_shares.gain(row):.2f}, limits {limits}", flush=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        del steps
        gc.collect()  # the models of this case are freed before the next are built
        fusedseq.empty_cache()
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
