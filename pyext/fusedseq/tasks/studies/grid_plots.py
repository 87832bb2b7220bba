"""The plots of a grid: losses over the epochs, and BLEU as bars."""

from pathlib import Path
from typing import Any

from fusedseq.tasks.training.files import replaced


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def losses(path: Path, curves: dict[str, list[dict]]) -> None:
    """Draws the validation losses as solid lines and the training losses as dashed lines.

    curves: {name: the lines of epochs.csv}
    """
    figure, axes = _figure(10, 6)
    for i, (name, lines) in enumerate(curves.items()):
        epochs = range(1, len(lines) + 1)
        # Ten colours; the second ten curves have other line styles.
        styles = (
            ("valid_loss", "-" if i < 10 else "-.", name),
            ("train_loss", "--" if i < 10 else ":", None),
        )
        for column, style, label in styles:
            values = [float(line[column]) for line in lines]
            axes.plot(epochs, values, style, color=f"C{i % 10}", marker=".", label=label)
    axes.set(xlabel="epoch", ylabel="loss", title="loss: validation (solid) and training (dashed)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if curves:
        figure.legend(loc="outside right upper", fontsize="small")
    with replaced(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def bars(path: Path, rows: list[dict[str, Any]], varying: list[str]) -> None:
    """Draws our BLEU beside the reported BLEU of each configuration.

    rows: with "test bleu" and "document test bleu" (the reported value) where they are known
    varying: the keys that identify a configuration
    """
    figure, axes = _figure(10, 5)
    series = ((-0.2, "test bleu", "ours"), (0.2, "document test bleu", "reported"))
    for offset, key, label in series:
        known = [(i + offset, row[key]) for i, row in enumerate(rows) if row.get(key) is not None]
        if known:
            drawn = axes.bar(*zip(*known, strict=True), 0.4, label=label)
            axes.bar_label(drawn, fmt="%.3f", rotation=90, fontsize="small", padding=2)
    names = ["-".join(str(row[key]) for key in varying) for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=60, ha="right", rotation_mode="anchor")
    axes.set(
        xlabel="-".join(key.rpartition(".")[2] for key in varying),
        ylabel="BLEU of the test split",
        title="BLEU of each configuration",
    )
    axes.margins(y=0.15)
    if axes.containers:
        figure.legend(loc="outside upper right", ncols=2)
    with replaced(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)
