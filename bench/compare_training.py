"""Whole training steps of any row, operator sets side by side, from the same weights on the same batches.

    python -m bench.compare_training agree --data DIR ptb/awd      do fused and reference give the same training losses?
    python -m bench.compare_training speed --data DIR              items per second, fused against the PyTorch a good user
                                                                   writes and against that under torch.compile
    python -m bench.compare_training table                         what `speed` found, for the README

`speed` goes step by step through the sets in turn (whatever disturbs the machine disturbs all), every set on the same few
batches, all of which it has seen before it is timed; it reports medians and writes bench/results/. Its baseline is
bench/baselines.py, not the oracle.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import fusedseq
import torch
from fusedseq.tasks.catalog import task_module
from fusedseq.tasks.rows import ROWS
from fusedseq.tasks.training import override

from bench import figures, machine
from bench.training_sets import SETS, Run, prototype

RESULTS = Path(__file__).parent / "results"
BARS = {  # times as fast as the baselines
    "words": 2.0, "reverse": 2.0, "en-es": 1.5, "en-fr": 1.5, "ptb/mogrifier-awd": 1.8, "ptb/awd-merity": 1.25
}  # fmt: skip
SIZES = {
    "words": ["data.min_frequency=1"]
}  # of the data, for the documented 100,000 words: the Catalan text has 90,773
DEFAULT = {
    "agree": ("ptb/mogrifier-awd", "ptb/awd-merity"),
    "speed": ("words/base", "words/prenorm-8", "reverse/base", "reverse/tuned", "en-es/base", "en-fr/base",
              "ptb/mogrifier-awd", "ptb/awd-merity"),
}  # fmt: skip


def agree(args, row, task):
    """The largest difference of the training losses in `args.steps` steps."""
    runs = [Run(name, task, args.seed) for name in args.ops]
    other = Run(args.ops[-1], task, args.seed) if args.yardstick else None
    if other:
        perturb(other.task.model)
    losses, worst, yardstick = [], (0.0, 0), 0.0
    for step in range(1, args.steps + 1):
        losses.append([run.step()[0].item() for run in runs])
        if other:
            yardstick = max(yardstick, abs(other.step()[0].item() - losses[-1][-1]))
        worst = max(worst, (max(losses[-1]) - min(losses[-1]), step))
        if step % 10 == 0 or step == args.steps:
            print(f"{row}: step {step}, loss {losses[-1][0]:.6f}, largest difference {worst[0]:.3g} "
                  f"(step {worst[1]})", flush=True)  # fmt: skip
    if other:
        print(f"{row}: {args.ops[-1]} against itself from weights one rounding away: {yardstick:.3g}", flush=True)
    return {
        "ops": args.ops,
        "steps": args.steps,
        "yardstick": yardstick if other else None,
        "largest difference": worst[0],
        "at step": worst[1],
        "losses": losses,
    }


def perturb(model):
    """Moves every weight to a neighbouring floating point number: what rounding alone does to a training run."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))


def speed(args, row, task):
    """Items per second of each operator set: medians of at least `args.steps` rounds and `args.seconds`."""
    runs = [Run(name, task, args.seed, args.batches) for name in args.ops]
    warmups = {run.name: warm_up(run, args) for run in runs}
    neighbours, times = machine.Neighbours(), {run.name: [] for run in runs}
    begun, rounds = time.perf_counter(), 0
    while rounds < args.steps or (time.perf_counter() - begun < args.seconds and rounds < 1000):
        for run in runs[:: 1 if rounds % 2 else -1]:
            times[run.name].append(run.step()[1:])
        rounds += 1
    result = told(task, args, times) | {
        "warm-up seconds": warmups, "others busy": neighbours.busy(), "vocabulary": vocabularies(task),
        "step seconds": {name: [round(s, 5) for _, s in pairs] for name, pairs in times.items()},
    }  # fmt: skip
    result["bars"] = verdicts(row, result)
    print(sentence(row, task, result), flush=True)
    return result


def warm_up(run, args):
    """Takes every batch that is timed, so that all shapes are known and memory of these sizes is at hand, which takes a few
    steps; returns the seconds, compilation included."""
    begun = time.perf_counter()
    for _ in range(max(args.batches, 4)):
        run.step()
    return round(time.perf_counter() - begun, 1)


def told(task, args, times):
    first, *others = args.ops
    ratios = {
        f"{first} / {other}": statistics.median(
            theirs / ours for (_, ours), (_, theirs) in zip(times[first], times[other], strict=True)
        )
        for other in others
    }
    rates = {name: statistics.median(items / s for items, s in pairs) for name, pairs in times.items()}
    return {
        "batch": task.settings.data.batch,
        "batches": args.batches,
        f"{task.unit} per second": rates,
        "ratio": ratios,
    }


def vocabularies(task):
    """The numbers of words that the model knows."""
    words = task.description()["vocabulary"]
    return {side: len(part) for side, part in words.items()} if isinstance(words, dict) else len(words)


def verdicts(row, result):
    """[(times as fast, as what, met)]; met is None where that was not measured."""
    bar = BARS.get(row, BARS.get(row.partition("/")[0]))
    ratio = result["ratio"].get("fused / baselines")
    return [] if bar is None else [(bar, "baselines", None if ratio is None else ratio >= bar)]


def sentence(row, task, result):
    rates = ", ".join(f"{name} {rate:,.0f} {task.unit}/s" for name, rate in result[f"{task.unit} per second"].items())
    ratios = ", ".join(f"{pair} {ratio:.2f}x" for pair, ratio in result["ratio"].items())
    bars = "".join(f"; >= {bar:g}x {other}: {MARK[met]}" for bar, other, met in result["bars"])
    busy = "; DISTURBED by others" * figures.disturbed(result)
    return f"{row}: {rates}; {ratios}{bars}{busy}"


MARK = {True: "met", False: "MISSED", None: "not measured"}


def markdown(document):
    """The table of a result of `speed`; an operator set that a row was not measured with is left blank there."""
    sets = list(dict.fromkeys(name for row in document["rows"].values() for name in row["step seconds"]))
    lines = [["row", "V", *(f"{name}, items/s" for name in sets), *(f"× {name}" for name in sets[1:]), "bar"]]
    lines.append(["---"] * len(lines[0]))
    for name, row in document["rows"].items():
        rates = next(value for key, value in row.items() if key.endswith(" per second"))
        words = row["vocabulary"]
        V = " / ".join(f"{n:,}" for n in words.values()) if isinstance(words, dict) else f"{words:,}"
        star = "*" * figures.disturbed(row)
        lines.append([
            name + star, V, *(f"{rates[key]:,.0f}" if key in rates else "" for key in sets),
            *(f"{row['ratio'][pair]:.2f}" if pair in row["ratio"] else "" for pair in (f"{sets[0]} / {key}" for key in sets[1:])),
            "; ".join(f"≥ {bar:g} × {other}: {MARK[met]}" for bar, other, met in row["bars"]),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m bench.compare_training", description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=("agree", "speed", "table"))
    parser.add_argument("rows", nargs="*", metavar="TASK/PRESET", help="default: see the result files")
    parser.add_argument("--data", help="the data's directory, or 'synthetic' (default: $FUSEDSEQ_DATA)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments")
    parser.add_argument("--ops", nargs="+", choices=SETS, help="default: fused, and what the mode compares it with")
    parser.add_argument("--steps", type=int, help="default: 200 to agree; for speed at least 5 rounds")
    parser.add_argument("--seconds", type=float, default=10, help="speed: of measuring a row (default: %(default)s)")
    parser.add_argument(
        "--batches", type=int, default=3, help="speed: different ones, again and again (default: %(default)s)"
    )
    parser.add_argument(
        "--yardstick", action="store_true", help="agree: also run the last set from weights one rounding away"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="the JSON file (default: in bench/results)")
    args = parser.parse_args(argv)
    facts = machine.facts(args.device)
    if args.mode == "table":
        print(markdown(json.loads((args.out or result_file(facts, args, "speed")).read_text())))
        return 0
    args.ops = args.ops or {"agree": ["fused", "reference"], "speed": ["fused", "baselines", "compiled"]}[args.mode]
    args.steps = args.steps or {"agree": 200, "speed": 5}[args.mode]
    function = {"agree": agree, "speed": speed}[args.mode]
    out = args.out or result_file(facts, args, args.mode)
    data = "synthetic" if args.data == "synthetic" else "the tasks' own"
    document: dict = {**facts, "data": data, "settings": args.assignments, "rows": {}}
    try:
        for row in args.rows or DEFAULT[args.mode]:
            task, settings = chosen(row, [*SIZES.get(row.partition("/")[0], ()), *args.assignments])
            task = prototype(task, settings, args.data, args.seed, args.device)
            document["rows"][row] = function(args, row, task)
            gc.collect()  # the models of this row, and then what they were made of
            fusedseq.empty_cache()
            out.write_text(json.dumps(document, indent=1) + "\n")  # each time, as a run of all takes minutes
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"written: {out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out}")
    return 0


def result_file(facts, args, mode):
    return RESULTS / f"{machine.slug(facts, args.device)}-training-{mode}.json"


def chosen(row, assignments):
    """(the task's name, the settings) of a row."""
    if row not in ROWS or ROWS[row].preset is None:
        known = ", ".join(name for name, each in ROWS.items() if each.preset)
        raise ValueError(f"unknown row {row!r}; known are {known}")
    return ROWS[row].task, override(task_module(ROWS[row].task).PRESETS[ROWS[row].preset], assignments)


if __name__ == "__main__":
    sys.exit(main())
