"""Compares training steps of any preset with several operator sets, from the same weights.

    python -m bench.training.compare agree --data DATA ptb/awd   fused and reference: equal losses?
    python -m bench.training.compare speed --data DATA           items per second of operator sets
    python -m bench.training.compare table                       the table of what `speed` measured

`speed` compares fused with the PyTorch that an experienced user writes (bench/suite/baselines) and
with that under torch.compile, not with the oracle. All sets take the same few batches again and
again. Both modes write a file in bench/results.
"""

import argparse
import gc
import json
import sys
from pathlib import Path

import fusedseq
import torch
from fusedseq.tasks.catalog import task_module
from fusedseq.tasks.experiments.documented import EXPERIMENTS
from fusedseq.tasks.training import override

from bench.suite import machine, mkl
from bench.training.agreement import measure_agreement
from bench.training.operator_sets import CHOICES, prototype
from bench.training.speed import markdown, measure_speed

RESULTS = Path(__file__).parents[1] / "results"
# The source report has 100,000 words; the Catalan text has 90,773, so all of its words are used.
TASK_SETTINGS = {"words": ["data.min_frequency=1"]}
PRESETS = {
    "agree": ("ptb/mogrifier-awd", "ptb/awd-merity"),
    "speed": (
        "words/base",
        "words/prenorm-8",
        "reverse/base",
        "reverse/tuned",
        "en-es/base",
        "en-fr/base",
        "ptb/mogrifier-awd",
        "ptb/awd-merity",
    ),
}
OPERATOR_SETS = {"agree": ["fused", "reference"], "speed": ["fused", "baselines", "compiled"]}
STEPS = {"agree": 200, "speed": 5}
MEASURE = {"agree": measure_agreement, "speed": measure_speed}


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m bench.training.compare", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("mode", choices=("agree", "speed", "table"))
    parser.add_argument(
        "presets", nargs="*", metavar="TASK/PRESET", help="default: see the result files"
    )
    parser.add_argument(
        "--data", help="the data's directory, or 'synthetic' (default: $FUSEDSEQ_DATA)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments"
    )
    parser.add_argument(
        "--ops",
        nargs="+",
        choices=CHOICES,
        metavar="SET[:PRECISION]",
        help="operator sets: fused, reference, baselines, chunked-loss (baselines with torch's "
        "F.linear_cross_entropy) or compiled, with :bf16 or :fp32 for another precision than "
        "training.precision (default: fused, and what the mode compares it with)",
    )
    parser.add_argument("--steps", type=int, help="agree: steps (200); speed: least rounds (5)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10,
        help="speed: least measuring time of a preset (default: %(default)s)",
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=3,
        help="speed: number of different batches, which are repeated (default: %(default)s)",
    )
    parser.add_argument(
        "--yardstick",
        action="store_true",
        help="agree: also run the last set from weights that differ by one rounding",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="the JSON file (default: in bench/results)")
    mkl.add_argument(parser)
    return parser, parser.parse_args(argv)


def main(argv=None):
    parser, args = parse(argv)
    if args.mkl == "unthrottled" and args.mode != "table" and not mkl.is_unthrottled():
        return mkl.run_preloaded("bench.training.compare", sys.argv[1:] if argv is None else argv)
    facts = machine.facts(args.device)
    if args.mode == "table":
        print(markdown(json.loads((args.out or result_file(facts, args, "speed")).read_text())))
        return 0
    # torch.compile would run plain PyTorch, without an error, after eight compilations.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    args.ops = args.ops or OPERATOR_SETS[args.mode]
    args.steps = args.steps or STEPS[args.mode]
    out = args.out or result_file(facts, args, args.mode)
    try:
        measure_presets(args, facts, out)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"written: {out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out}")
    return 0


def measure_presets(args, facts, out):
    """Measures every preset, and writes the result after each, since all take many minutes."""
    data = "synthetic" if args.data == "synthetic" else "the tasks' own"
    result: dict = {
        **facts,
        "mkl": args.mkl,
        "data": data,
        "settings": args.assignments,
        "rows": {},
    }
    for preset in args.presets or PRESETS[args.mode]:
        assignments = [*TASK_SETTINGS.get(preset.partition("/")[0], ()), *args.assignments]
        task, settings = settings_of(preset, assignments)
        task = prototype(task, settings, args.data, args.seed, args.device)
        result["rows"][preset] = MEASURE[args.mode](args, preset, task)
        gc.collect()  # the models of this preset are freed before the next are built
        fusedseq.empty_cache()
        out.write_text(json.dumps(result, indent=1) + "\n")


def result_file(facts, args, mode):
    parts = [machine.slug(facts, args.device), "training", mode, mkl.suffix(args.mkl)]
    return RESULTS / ("-".join(filter(None, parts)) + ".json")


def settings_of(preset, assignments):
    """Returns the task's name and the settings of TASK/PRESET after these assignments."""
    if preset not in EXPERIMENTS or EXPERIMENTS[preset].preset is None:
        known = ", ".join(name for name, each in EXPERIMENTS.items() if each.preset)
        raise ValueError(f"unknown preset {preset!r}; known are {known}")
    experiment = EXPERIMENTS[preset]
    presets = task_module(experiment.task).PRESETS
    return experiment.task, override(presets[experiment.preset], assignments)


if __name__ == "__main__":
    sys.exit(main())
