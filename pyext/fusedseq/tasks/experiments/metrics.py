"""The metrics of experiments and results as text: the reported values beside ours."""

from typing import Any

from fusedseq.tasks.experiments.experiment import Experiment

# The metrics that are stored at the top level of a result, and how they are displayed.
ABOUT_A_RUN = {
    "seconds": "training time",
    "seconds per epoch": "time per epoch",
    "parameters": "parameters",
}
# The metrics of test splits that are shown for an experiment without reported values.
TESTS = (
    *("perplexity", "loss", "accuracy", "token_accuracy", "sequence_accuracy"),
    *("bleu", "bleu_unsmoothed", "sacrebleu", "chrf"),
)
# {metric: other metrics that are shown with it and that no source reports}
COMPANIONS = {
    "bleu": ("bleu_unsmoothed", "sacrebleu", "chrf"),
    "perplexity": ("tempered_perplexity", "dynamic_perplexity"),  # of `fusedseq eval`'s options
    "vote_accuracy": ("accuracy",),
}


def of_experiment(experiment: Experiment) -> list[str]:
    """Lines: the reported values of an experiment, then its remark."""
    lines = [text(name, value) for name, value in experiment.metrics.items()]
    return [*lines, *([experiment.remark] if experiment.remark else [])] or ["—"]


def of_result(experiment: Experiment, result: dict[str, Any]) -> list[str]:
    """Lines: the metrics of a result that the experiment reports, see `names_of`."""
    return [text(name, value_of(result, name)) for name in names_of(experiment, result)]


def names_of(experiment: Experiment, result: dict[str, Any]) -> list[str]:
    """The names of the metrics of a result that are shown: those that the experiment reports.

    Where the experiment reports none of a split, those of the result's test splits.
    """
    names = [name for name in experiment.metrics if value_of(result, name) is not None]
    of_splits = [name for name in experiment.metrics if name not in ABOUT_A_RUN]
    for split, _, metric in [name.partition(" ") for name in of_splits]:
        companions = [f"{split} {other}" for other in COMPANIONS.get(metric, ())]
        names += [name for name in companions if value_of(result, name) is not None]
    if all(name in ABOUT_A_RUN for name in names):
        names += _of_test_splits(result)
    return names


def value_of(result: dict[str, Any], name: str) -> Any:
    """The metric `name` of a result, as Experiment names it; None where the result has none."""
    if name in ABOUT_A_RUN:
        return result.get(name)
    split, _, metric = name.partition(" ")
    if split == "train":  # measured during training, with dropout
        return result["validations"][-1].get(f"train_{metric}") if result["validations"] else None
    return (result.get(split) or {}).get(metric)


def _of_test_splits(result: dict[str, Any]) -> list[str]:
    return [
        f"{split} {metric}"
        for split, part in result.items()
        if split.endswith("test")
        for metric in TESTS
        if metric in part
    ]


def text(name: str, value: float) -> str:
    """A metric with its name, in the unit that people read."""
    return f"{ABOUT_A_RUN.get(name, name)} {number(name, value)}"


def number(name: str, value: float) -> str:
    """The value of a metric, in the unit that people read."""
    if name.endswith("accuracy"):
        return f"{100 * value:.4g} %"
    if name.startswith("seconds"):
        return duration(value)
    if name == "parameters":
        return f"{value / 1e6:.3g}M"
    return f"{value:.2f}" if name.endswith("perplexity") else f"{value:.4g}"


def duration(seconds: float) -> str:
    """A duration as text, e.g. 90 s, 35 min, 2 h 05 min."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def counted(n: int, plural: str) -> str:
    """A count with its noun: 1 epoch, 2,000 steps."""
    return f"{n:,} {plural if n != 1 else plural.removesuffix('s')}"


def budget(result: dict[str, Any]) -> list[str]:
    """Lines: how long a run was, and each setting in which it differs from its preset."""
    training = result["settings"]["training"]
    limits = [
        f"of {counted(training[key], key)}"
        for key in ("epochs", "steps")
        if training[key] is not None
    ]
    done = ", ".join(counted(result[key], key) for key in ("epochs", "steps"))
    parts = [done if not limits else f"{done} ({', '.join(limits)}; ended: {result['ended']})"]
    parts += [f"{key} {value}" for key, value in result["changes"].items()]
    parts += [result["note"]] if result.get("note") else []
    return parts


def hardware(result: dict[str, Any]) -> str:
    """The GPU, or the cores and threads of the CPU, and the training time."""
    machine = result["machine"]
    cpu = (
        f"{counted(machine['threads'], 'threads')} on {counted(machine['cores'], 'cores')} "
        f"of {machine['cpu']}"
    )
    return f"{machine['gpu'] or cpu}, {duration(result['seconds'])} of training"
