"""The report of `fusedseq tune`: a table, trials.csv, history.png, importances.png."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from fusedseq.tasks.studies.table import show, write_csv
from fusedseq.tasks.studies.trials import Trials
from fusedseq.tasks.training.files import replaced

STATES = {
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
    "RUNNING": "running",
    "WAITING": "waiting",
}


def write(trials: Trials) -> None:
    """Writes and prints the whole report."""
    rows, best, written = write_table(trials), trials.best(), ["trials.csv"]
    if not rows:
        return
    show(
        rows,
        f"study {trials.name}, the best first",
        bold=lambda row: best is not None and row["trial"] == best.number,
    )
    shares = _importances(trials)
    text = ", ".join(f"{key} {share:.0%}" for key, share in shares.items())
    print(f"importance: {text or 'needs two complete trials'}")
    try:
        _draw(trials.out / "history.png", lambda axes: _history(axes, trials))
        written.append("history.png")
        if shares:
            _draw(trials.out / "importances.png", lambda axes: _bars(axes, shares))
            written.append("importances.png")
    except ImportError as error:
        print(f"no plots: they need the Python package {error.name} (pip install {error.name})")
    print(f"written to {trials.out}: {', '.join(written)}", flush=True)


def write_table(trials: Trials) -> list[dict[str, Any]]:
    """Writes trials.csv and returns its rows."""
    rows = _rows(trials)
    if rows:
        write_csv(trials.out / "trials.csv", rows)
    return rows


def _rows(trials: Trials) -> list[dict[str, Any]]:
    """A dict for each trial: complete trials sorted by loss, then the others by number."""
    repeated_as = {t.user_attrs.get("again"): t.number for t in trials.all()}

    def why(t: FrozenTrial) -> str:
        if t.state != TrialState.FAIL or "why" in t.user_attrs:
            return t.user_attrs.get("why", "")
        if t.number in repeated_as:
            return f"its process ended, repeated as {repeated_as[t.number]}"
        return "its process died each time"

    def order(t: FrozenTrial) -> tuple[bool, float]:
        if t.state == TrialState.COMPLETE and t.value is not None:
            return False, t.value
        return True, t.number

    return [
        {
            "trial": t.number,
            "state": STATES[t.state.name],
            "loss": t.value,
            "epochs": len(t.intermediate_values),
            "seconds": round(t.duration.total_seconds(), 1) if t.duration else None,
            **{key: t.params.get(key) for key in trials.space},
            **{
                name: value
                for name, value in t.user_attrs.get("figures", {}).items()
                if isinstance(value, float) and name != "loss"
            },
            "why": why(t),
        }
        for t in sorted(trials.all(), key=order)
    ]


def _importances(trials: Trials) -> dict[str, float]:
    """{setting: its share of the importance}, the largest first, by PED-ANOVA (Watanabe et al.,
    2023); empty with fewer than two complete trials."""
    complete = [t for t in trials.all() if t.state == TrialState.COMPLETE]
    if len(complete) < 2:
        return {}
    return optuna.importance.get_param_importances(trials.study)


def _draw(path: Path, draw: Callable[[Any], None]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    draw(figure.subplots())
    with replaced(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def _history(axes: Any, trials: Trials) -> None:
    """Draws the loss of each trial, and the best loss so far."""
    best, line = None, []
    kinds = ((TrialState.COMPLETE, "o", "complete"), (TrialState.PRUNED, "x", "pruned"))
    for state, marker, label in kinds:
        found = [t for t in trials.all() if t.state == state and t.value is not None]
        if found:
            axes.scatter(
                [t.number for t in found], [t.value for t in found], marker=marker, label=label
            )
    for t in trials.all():
        if t.state == TrialState.COMPLETE and t.value is not None:
            best = t.value if best is None else min(best, t.value)
            line.append((t.number, best))
    if line:
        axes.step(*zip(*line, strict=True), where="post", label="best so far")
        axes.legend()
    low, high = axes.get_ylim()
    if high > 10 * low > 0:
        axes.set_yscale("log")
    axes.set(xlabel="trial", ylabel="validation loss", title="loss of each trial")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3, which="both")


def _bars(axes: Any, shares: dict[str, float]) -> None:
    """Draws the importance of each setting."""
    names = [key.rpartition(".")[2] for key in reversed(shares)]
    values = [*reversed(shares.values())]
    axes.bar_label(axes.barh(names, values), [f"{value:.0%}" for value in values], padding=3)
    axes.set(
        xlabel="share (PED-ANOVA)",
        xlim=(0, 1.1 * max(*values, 0.01)),
        title="importance of the settings for the validation loss",
    )
