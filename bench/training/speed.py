"""Measures how many items per second each operator set trains."""

import statistics
import time

from bench.suite import machine, metrics, unthrottled_targets
from bench.suite.report import MARK, markdown_table
from bench.training.operator_sets import Run

TARGETS = {  # times as fast as the baselines; of a task, or of one preset
    "words": 2.0,
    "reverse": 2.0,
    "en-es": 1.5,
    "en-fr": 1.5,
    "ptb/mogrifier-awd": 1.8,
    "ptb/awd-merity": 1.25,
}
# The same of fused:bf16, over the fused operators in fp32 and the baselines under bf16 autocast.
BF16_TARGETS = {"fused": 1.35, "baselines:bf16": 1.5}
MAX_ROUNDS = 1000


def measure_speed(args, preset, task):
    """Returns items per second of each operator set and the ratios of step times, all as medians.

    The sets take one step each per round, in an order that alternates, until at least `args.steps`
    rounds and `args.seconds` are over: whatever disturbs the machine disturbs all of them.
    """
    runs = [Run(name, task, args.seed, args.batches) for name in args.ops]
    warmups = {run.name: warm_up(run, args.batches) for run in runs}
    neighbours, steps = machine.Neighbours(), {run.name: [] for run in runs}
    begin, rounds = time.perf_counter(), 0
    while rounds < args.steps or (
        time.perf_counter() - begin < args.seconds and rounds < MAX_ROUNDS
    ):
        for run in runs[:: 1 if rounds % 2 else -1]:
            loss, *timed = run.step()
            if not loss.isfinite():
                raise ValueError(f"{preset}: the loss of {run.name} is {loss.item()}")
            steps[run.name].append(tuple(timed))
        rounds += 1
    entry = medians(task, args, steps) | {
        "warm-up seconds": warmups,
        "others busy": neighbours.busy(),
        "vocabulary": vocabulary_sizes(task),
        "step seconds": {name: [round(s, 5) for _, s in pairs] for name, pairs in steps.items()},
    }
    entry["bars"] = verdicts(preset, entry, args.mkl)
    print(sentence(preset, task, entry), flush=True)
    return entry


def warm_up(run, batches):
    """Takes every batch that is timed, at least four steps; returns the seconds that it took.

    Afterwards all shapes are compiled, and the allocators have memory of these sizes.
    """
    begin = time.perf_counter()
    for _ in range(max(batches, 4)):
        run.step()
    return round(time.perf_counter() - begin, 1)


def medians(task, args, steps):
    """Returns the medians of (items, seconds) pairs; a ratio is that of two steps of one round."""
    first, *others = args.ops
    ratios = {
        f"{first} / {other}": statistics.median(
            theirs / ours for (_, ours), (_, theirs) in zip(steps[first], steps[other], strict=True)
        )
        for other in others
    }
    rates = {
        name: statistics.median(items / s for items, s in pairs) for name, pairs in steps.items()
    }
    return {
        "batch": task.settings.data.batch,
        "batches": args.batches,
        f"{task.unit} per second": rates,
        "ratio": ratios,
    }


def vocabulary_sizes(task):
    """Returns the number of words in the model's vocabulary, or {side: number} for a translator."""
    words = task.description()["vocabulary"]
    if isinstance(words, dict):
        return {side: len(part) for side, part in words.items()}
    return len(words)


def verdicts(preset, entry, mode="as-installed"):
    """Returns [(target, provider, met)]; met is None if that was not measured.

    mode: of MKL, in which the baselines ran
    """
    if any(pair.startswith("fused:bf16 /") for pair in entry["ratio"]):
        pairs = {name: f"fused:bf16 / {name}" for name in BF16_TARGETS}
        return [
            (target, name, entry["ratio"][pairs[name]] >= target)
            for name, target in BF16_TARGETS.items()
            if pairs[name] in entry["ratio"]
        ]
    if mode == "unthrottled":
        target = unthrottled_targets.PRESETS.get(preset)
    else:
        target = TARGETS.get(preset, TARGETS.get(preset.partition("/")[0]))
    if target is None:
        return []
    ratio = entry["ratio"].get("fused / baselines")
    return [(target, "baselines", None if ratio is None else ratio >= target)]


def sentence(preset, task, entry):
    rates = ", ".join(
        f"{name} {rate:,.0f} {task.unit}/s"
        for name, rate in entry[f"{task.unit} per second"].items()
    )
    ratios = ", ".join(f"{pair} {ratio:.2f}x" for pair, ratio in entry["ratio"].items())
    targets = "".join(
        f"; target >= {target:g}x {other}: {MARK[met]}" for target, other, met in entry["bars"]
    )
    busy = "; DISTURBED by other processes" * metrics.disturbed(entry)
    return f"{preset}: {rates}; {ratios}{targets}{busy}"


def markdown(result):
    """Returns the table of a result, with empty cells for what was not measured."""
    entries = result["rows"]
    sets = list(dict.fromkeys(name for entry in entries.values() for name in entry["step seconds"]))
    head = [
        "preset",
        "vocabulary",
        *(f"{name}, items/s" for name in sets),
        *(f"× {name}" for name in sets[1:]),
        "target",
    ]
    return markdown_table([head, *(cells(name, entry, sets) for name, entry in entries.items())])


def cells(preset, entry, sets):
    rates = next(value for key, value in entry.items() if key.endswith(" per second"))
    words = entry["vocabulary"]
    sizes = words.values() if isinstance(words, dict) else [words]
    ratios = [entry["ratio"].get(f"{sets[0]} / {name}") for name in sets[1:]]
    return [
        preset + " *" * metrics.disturbed(entry),
        " / ".join(f"{n:,}" for n in sizes),
        *(f"{rates[name]:,.0f}" if name in rates else "" for name in sets),
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        "; ".join(f"≥ {target:g}× {other}: {MARK[met]}" for target, other, met in entry["bars"]),
    ]
