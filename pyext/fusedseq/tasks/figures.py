"""Figures of rows and results as text: what a row is to reach beside what was reached."""

# Figures that stand in a result itself, and what they are called.
ABOUT_A_RUN = {"seconds": "trained", "seconds per epoch": "an epoch", "parameters": "parameters"}
TESTS = (
    "perplexity",
    "loss",
    "accuracy",
    "token_accuracy",
    "sequence_accuracy",
    "bleu",
)  # what a row without figures shows

BESIDE = {
    "bleu": "sacrebleu",
    "vote_accuracy": "accuracy",
}  # figure: another that is shown with it, which no document has


def of_row(row):
    """Lines: the figures of a row's document, then what it says."""
    lines = [text(name, figure) for name, figure in row.figures.items()]
    return [*lines, *([row.said] if row.said else [])] or ["—"]


def of_result(row, result):
    """Lines: the figures of a result that the row has, or those of its test sets where the row has none."""
    names = [name for name in row.figures if value(result, name) is not None]
    for split, _, figure in [name.partition(" ") for name in row.figures if name not in ABOUT_A_RUN]:
        beside = f"{split} {BESIDE.get(figure)}"
        names += [beside] if value(result, beside) is not None else []
    if not any(name not in ABOUT_A_RUN for name in names):
        names += _of_tests(result)
    return [text(name, value(result, name)) for name in names]


def value(result, name):
    """The figure `name` of a result, as rows name it; None where it has none."""
    if name in ABOUT_A_RUN:
        return result.get(name)
    split, _, figure = name.partition(" ")
    if split == "train":  # as measured on the way, dropout on
        return result["validations"][-1].get(f"train_{figure}") if result["validations"] else None
    return (result.get(split) or {}).get(figure)


def _of_tests(result):
    return [
        f"{split} {figure}"
        for split, part in result.items()
        if split.endswith("test")
        for figure in TESTS
        if figure in part
    ]


def text(name, figure):
    return f"{ABOUT_A_RUN.get(name, name)} {_number(name, figure)}"


def _number(name, figure):
    if name.endswith("accuracy"):
        return f"{100 * figure:.4g} %"
    if name.startswith("seconds"):
        return duration(figure)
    if name == "parameters":
        return f"{figure / 1e6:.3g}M"
    return f"{figure:.2f}" if name.endswith("perplexity") else f"{figure:.4g}"


def duration(seconds):
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def counted(n, plural):
    """1 epoch, 2,000 steps."""
    return f"{n:,} {plural if n != 1 else plural.removesuffix('s')}"


def budget(result):
    """How long a run was, and in what it differs from its preset."""
    training = result["settings"]["training"]
    limits = [f"of {counted(training[key], key)}" for key in ("epochs", "steps") if training[key] is not None]
    done = ", ".join(counted(result[key], key) for key in ("epochs", "steps"))
    parts = [done if not limits else f"{done} ({', '.join(limits)}; ended: {result['ended']})"]
    parts += [f"{key} {value}" for key, value in result["changes"].items()]
    parts += [result["note"]] if result.get("note") else []
    return parts


def hardware(result):
    machine = result["machine"]
    where = (
        machine["gpu"]
        or f"{counted(machine['threads'], 'threads')} on {counted(machine['cores'], 'cores')} of {machine['cpu']}"
    )
    return f"{where}, {duration(result['seconds'])} of training"
