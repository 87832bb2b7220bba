"""The picture of a result: for each row how many times as fast as each provider the fused operator is."""

from matplotlib.figure import Figure

from bench import figures, report

COLOURS = {"eager": "#4c72b0", "torch": "#55a868", "compiled": "#dd8452", "compiled whole": "#937860"}


def draw(document, path):
    rows = document["rows"][::-1]  # the first on top
    figure = Figure(figsize=(10, 1.5 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    labelled = set()
    for y, row in enumerate(rows):
        present = [name for name in COLOURS if name in row["median"]]
        height = 0.8 / max(1, len(present))
        for i, name in enumerate(present):
            value = figures.gain(row, name)
            place = y + 0.4 - height * (i + 0.5)
            axes.barh(place, value, height * 0.9, color=COLOURS[name], label=None if name in labelled else name)
            axes.text(value, place, f" {value:.2f}", va="center", fontsize=7)
            labelled.add(name)
            for against, least in row["bars"]:
                if against == name:
                    axes.plot([least, least], [place - height / 2, place + height / 2], color="black", linewidth=2)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_yticks(
        range(len(rows)), [f"{row['name']}\n{row['median']['fused'] * 1e3:.3g} ms" for row in rows], fontsize=7
    )
    axes.set_xlabel("times as fast as (black: the bar to reach)")
    axes.set_title("\n".join(report.heading(document)), fontsize=7, loc="left", wrap=True)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
