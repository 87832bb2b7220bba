"""The pictures of a grid: the losses of all configurations over the epochs, and their BLEU in bars."""


def _figure(width, height):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def losses(path, curves):
    """curves: {name: rows of epochs.csv}. Validation is drawn through, training dashed."""
    figure, axes = _figure(10, 6)
    for i, (name, rows) in enumerate(curves.items()):
        epochs = range(1, len(rows) + 1)
        color = f"C{i % 10}"
        for column, style, label in (
            ("valid_loss", "-" if i < 10 else "-.", name),
            ("train_loss", "--" if i < 10 else ":", None),
        ):
            axes.plot(epochs, [float(row[column]) for row in rows], style, color=color, marker=".", label=label)
    axes.set(xlabel="epoch", ylabel="loss", title="validation (through) and training (dashed)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if curves:
        figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def bars(path, rows, varying):
    """varying: the keys that make a configuration    rows: with these, test bleu and document test bleu, each where it is known"""
    figure, axes = _figure(10, 5)
    for offset, key, label in ((-0.2, "test bleu", "ours"), (0.2, "document test bleu", "the document's")):
        known = [(i + offset, row[key]) for i, row in enumerate(rows) if row.get(key) is not None]
        if known:
            axes.bar_label(
                axes.bar(*zip(*known, strict=True), 0.4, label=label),
                fmt="%.3f",
                rotation=90,
                fontsize="small",
                padding=2,
            )
    axes.set_xticks(range(len(rows)), ["-".join(str(row[key]) for key in varying) for row in rows],
                    rotation=60, ha="right", rotation_mode="anchor")  # fmt: skip
    axes.set(xlabel="-".join(key.rpartition(".")[2] for key in varying), ylabel="BLEU of the test split")
    axes.margins(y=0.15)
    if axes.containers:
        figure.legend(loc="outside upper right", ncols=2)
    figure.savefig(path, dpi=120)
