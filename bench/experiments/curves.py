"""Draws the losses of the reproductions over their training steps."""

from fusedseq.tasks.catalog import TASKS

from bench.experiments.results import is_smoke_run, name_of


def results_with_curves(results, task):
    """Returns the reproductions of a task that have a curve.

    Two validations make no curve, and a run that was only evaluated again has its first result's.
    """
    found = []
    for experiment, several in results.items():
        if experiment.partition("/")[0] != task:
            continue
        for result in sorted(several, key=lambda result: result.get("label", "")):
            is_new = all(result["validations"] != other["validations"] for other in found)
            if len(result["validations"]) > 2 and not is_smoke_run(result) and is_new:
                found.append(result)
    return found


def draw(results, folder):
    """Writes curves-TASK.png for each task; returns their names, or a remark without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ["no curves, because matplotlib is not installed"]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for task in TASKS:
        runs = results_with_curves(results, task)
        if not runs:
            continue
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for i, result in enumerate(runs):
            draw_run(axes, result, f"C{i % 10}")
        axes.set(title=f"{task}: validation (solid), training (dotted)")
        axes.set(xlabel="training step", ylabel="loss (nats)", yscale=scale(runs))
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
        name = f"curves-{task}.png"
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
        written.append(name)
    return written


def scale(runs):
    """Returns a logarithmic scale if the validation losses differ by more than a factor of 10."""
    losses = [line["valid_loss"] for result in runs for line in result["validations"]]
    return "log" if max(losses) > 10 * min(losses) else "linear"


def draw_run(axes, result, colour):
    lines = result["validations"]
    steps = [line["step"] for line in lines]
    for split, style in (("train", ":"), ("valid", "-")):
        losses = [line[f"{split}_loss"] for line in lines]
        label = name_of(result) if split == "valid" else None
        axes.plot(steps, losses, style, color=colour, label=label)
