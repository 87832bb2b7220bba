"""Options of `fusedseq eval ptb`: a softmax temperature, and dynamic evaluation.

Example: fusedseq eval ptb RUN --temperature auto --dynamic sgd --lr 1
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from fusedseq.tasks.evaluation.dynamic_evaluation import DynamicEvaluation, evaluate
from fusedseq.tasks.evaluation.softmax_temperature import HIGHEST, LOWEST, best_temperature

TASKS = ("ptb",)
OPTIONS = ("temperature", "dynamic", "lr", "decay", "segment", "columns")


def add_arguments(group: Any) -> None:
    """Adds the options to an argument group of argparse."""
    add = group.add_argument
    add(
        "--temperature",
        type=temperature,
        metavar="T",
        help="softmax temperature: a number, or auto, which searches it from "
        f"{LOWEST} to {HIGHEST} on the validation split",
    )
    add(
        "--dynamic",
        choices=("sgd", "rms"),
        help="dynamic evaluation: after each segment of text the model is trained on it, by plain "
        "SGD or by steps scaled by its gradients on the training text (Krause et al., 2018)",
    )
    add(
        "--lr",
        type=float,
        help="learning rate of --dynamic, which requires it: tune it on the validation split",
    )
    add(
        "--decay",
        type=float,
        help="how far each step of --dynamic moves the weights back towards the trained ones, as a "
        "fraction of the way (default: 0)",
    )
    add(
        "--segment",
        type=int,
        metavar="WORDS",
        help=f"words in a segment of --dynamic (default: {DynamicEvaluation.segment})",
    )
    add(
        "--columns",
        type=int,
        help="columns that --dynamic cuts the text into and reads together (default: "
        f"{DynamicEvaluation.columns})",
    )


def temperature(text: str) -> str | float:
    """The type of --temperature."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or auto, got {text!r}") from None


def check(settings: Any, splits: Sequence[str], args: argparse.Namespace) -> None:
    """Raises ValueError where options contradict each other, the settings, or are out of range."""
    dynamic_evaluation(args)
    t = args.temperature
    if t not in (None, "auto") and not 0 < t < math.inf:
        raise ValueError(f"--temperature must be a finite number above 0, got {t}")
    if t not in (None, 1.0) and settings.model.splits:
        raise ValueError(f"--temperature must be 1 for a model with splits, got {t}")


def metrics(task: Any, splits: Sequence[str], args: argparse.Namespace) -> dict[str, dict]:
    """{split: the metrics that the options ask for}."""
    t: Any = 1.0 if args.temperature is None else args.temperature
    dynamic = dynamic_evaluation(args)
    if t == "auto":
        t = best_temperature(lambda t: task.evaluate("valid", t)["loss"])
    results: dict = {split: {} for split in splits}
    for split in splits:
        if args.temperature is not None:
            found = task.evaluate(split, t)
            results[split] |= {
                "temperature": t,
                "tempered_loss": found["loss"],
                "tempered_perplexity": found["perplexity"],
            }
        if dynamic:
            found = evaluate(task, split, dynamic, t)
            results[split] |= {
                "dynamic_loss": found["loss"],
                "dynamic_perplexity": found["perplexity"],
            }
    return results


def dynamic_evaluation(args: argparse.Namespace) -> DynamicEvaluation | None:
    """The DynamicEvaluation of the options; None without --dynamic."""
    given = {name: getattr(args, name) for name in ("lr", "decay", "segment", "columns")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.dynamic is None and given:
        raise ValueError(f"--{next(iter(given))} requires --dynamic, which is not given")
    if args.dynamic is not None and "lr" not in given:
        raise ValueError("--dynamic requires --lr, its learning rate")
    return None if args.dynamic is None else DynamicEvaluation(rms=args.dynamic == "rms", **given)
