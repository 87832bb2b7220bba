"""The picture of a result: for each case the speed of `fused` over every provider."""

from matplotlib.figure import Figure

from bench.suite import metrics

COLOURS = {
    "eager": "#4c72b0",
    "torch": "#55a868",
    "compiled": "#dd8452",
    "compiled whole": "#937860",
}


def draw(result, title, path):
    """Writes the picture; `title` is a list of lines."""
    entries = result["rows"][::-1]  # matplotlib's y axis points upwards: the first entry on top
    figure = Figure(figsize=(10, 1.5 + 0.55 * len(entries)), layout="constrained")
    axes = figure.subplots()
    labelled = set()
    for y, entry in enumerate(entries):
        draw_entry(axes, y, entry, labelled)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.12)  # room for the numbers beside the bars
    axes.axvline(1, color="grey", linewidth=0.8)
    labels = [f"{entry['name']}\n{entry['median']['fused'] * 1e3:.3g} ms" for entry in entries]
    axes.set_yticks(range(len(entries)), labels, fontsize=7)
    axes.set_xlabel("times as fast as the provider (black line: target)")
    axes.set_title("\n".join(title), fontsize=7, loc="left", wrap=True)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)


def draw_entry(axes, y, entry, labelled):
    """Draws a bar per provider of an entry, and its targets; labelled: names in the legend."""
    present = [name for name in COLOURS if name in entry["median"]]
    height = 0.8 / max(1, len(present))
    for i, name in enumerate(present):
        value, place = metrics.gain(entry, name), y + 0.4 - height * (i + 0.5)
        label = None if name in labelled else name
        # From 1 to the right where `fused` is faster, to the left where it is slower.
        axes.barh(place, value - 1, height * 0.9, left=1, color=COLOURS[name], label=label)
        axes.text(value, place, f" {value:.2f}", va="center", fontsize=7)
        labelled.add(name)
        ends = [place - height / 2, place + height / 2]
        for against, target in entry["bars"]:
            if against == name:
                axes.plot([target, target], ends, color="black", linewidth=2)
