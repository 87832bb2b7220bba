"""What a search leaves to read: a table on the terminal, trials.csv, history.png, importances.png."""

import optuna
from optuna.trial import TrialState

from fusedseq.tasks.studies.table import show, write_csv

STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}


def write(trials):
    """trials: a Trials"""
    rows, best, written = write_table(trials), trials.best(), ["trials.csv"]
    if not rows:
        return
    show(
        rows, f"study {trials.name}, the best first", bold=lambda row: best is not None and row["trial"] == best.number
    )
    shares = _importances(trials)
    print(
        "importance: "
        + (", ".join(f"{key} {share:.0%}" for key, share in shares.items()) or "it takes two complete trials")
    )
    try:
        for name, draw in (
            ("history.png", lambda axes: _history(axes, trials)),
            ("importances.png", lambda axes: _bars(axes, shares)),
        ):
            if name == "history.png" or shares:
                _draw(trials.out / name, draw)
                written.append(name)
    except ImportError as error:
        print(f"no plots: they need the Python package {error.name} (pip install {error.name})")
    print(f"written to {trials.out}: {', '.join(written)}", flush=True)


def write_table(trials):
    """trials.csv; returns its rows."""
    rows = _rows(trials)
    if rows:
        write_csv(trials.out / "trials.csv", rows)
    return rows


def _rows(trials):
    """One dict a trial: the complete ones by loss, then the others by number."""
    again = {t.user_attrs.get("again"): t.number for t in trials.all()}

    def why(t):
        if t.state != TrialState.FAIL or "why" in t.user_attrs:
            return t.user_attrs.get("why", "")
        return f"broken off, again as {again[t.number]}" if t.number in again else "its process died each time"

    def order(t):
        return (t.state != TrialState.COMPLETE, t.value if t.state == TrialState.COMPLETE else t.number)

    return [{
        "trial": t.number, "state": STATES[t.state.name], "loss": t.value, "epochs": len(t.intermediate_values),
        "seconds": round(t.duration.total_seconds(), 1) if t.duration else None,
        **{key: t.params.get(key) for key in trials.space},
        **{name: value for name, value in t.user_attrs.get("figures", {}).items()
           if isinstance(value, float) and name != "loss"}, "why": why(t),
    } for t in sorted(trials.all(), key=order)]  # fmt: skip


def _importances(trials):
    """{setting: its share}, the largest first; nothing of less than two complete trials. By PED-ANOVA (Watanabe et al., 2023)"""
    complete = [t for t in trials.all() if t.state == TrialState.COMPLETE]
    if len(complete) < 2:
        return {}
    return optuna.importance.get_param_importances(trials.study)


def _draw(path, draw):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    draw(figure.subplots())
    figure.savefig(path, dpi=120)


def _history(axes, trials):
    """Each trial's loss, and the best so far."""
    best, line = None, []
    kinds = ((TrialState.COMPLETE, "o", "complete"), (TrialState.PRUNED, "x", "pruned"))
    for state, marker, label in kinds:
        found = [t for t in trials.all() if t.state == state and t.value is not None]
        if found:
            axes.scatter([t.number for t in found], [t.value for t in found], marker=marker, label=label)
    for t in trials.all():
        if t.state == TrialState.COMPLETE:
            best = t.value if best is None else min(best, t.value)
            line.append((t.number, best))
    if line:
        axes.step(*zip(*line, strict=True), where="post", label="the best so far")
        axes.legend()
    low, high = axes.get_ylim()
    if high > 10 * low > 0:
        axes.set_yscale("log")
    axes.set(xlabel="trial", ylabel="validation loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3, which="both")


def _bars(axes, shares):
    names, values = [key.rpartition(".")[2] for key in reversed(shares)], [*reversed(shares.values())]
    axes.bar_label(axes.barh(names, values), [f"{value:.0%}" for value in values], padding=3)
    axes.set(xlabel="importance for the validation loss (PED-ANOVA)", xlim=(0, 1.1 * max(*values, 0.01)))
