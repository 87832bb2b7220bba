"""What a result says: a table on the screen, in Markdown and as a picture, and what got slower since another result.

python -m bench.report RESULT.json [--markdown] [--png FILE] [--compare OLD.json]
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from bench import figures

COLUMNS = ("fused", "eager", "compiled", "torch")  # the providers with a column of their own
HEAD = ["case", "mode", *(f"{name} ms" for name in COLUMNS), "gain", "peak MB (baseline)", "rate", "of roof", "bar"]
MARK = {True: "met", False: "MISSED", None: "not measured"}


def heading(facts, load=None):
    """Lines that say where and with what; `load`: of machine.load(), to warn of a machine that isn't quiet."""
    machine, versions = facts["machine"], facts["versions"]
    lines = [
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"kernels' ISA {machine['isa'] or 'unknown'} (torch: {machine['torch isa']}), {machine['system']}",
        ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        + f", commit {(facts['commit'] or 'unknown')[:12]}{' + changes' * facts['dirty']}, {facts['date']}",
    ]
    if load:
        average, busy = load
        lines.append(f"load average {average:.2f}; others use {busy:.2f} cores" if None not in load else "load unknown")
        if (busy or 0.0) > figures.BUSY:
            lines.append("WARNING: something else is running here; these times are not to be quoted")
    return lines


def three_digits(x):
    """The number with three significant digits, and never in exponents."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def cells(document, row):
    """The row's cells under HEAD."""
    ms, memory, against = row["median"], row["memory"], figures.baseline(row)

    def milliseconds(name):
        return three_digits(ms[name] * 1e3) if name in ms else row["left out"].get(name, "")

    def megabytes(name):
        return "?" if memory.get(name) is None else three_digits(memory[name] / 1e6)

    rate, unit = figures.rate(row)
    parts = figures.parts_of_roof(document, row)
    name = row["name"].removesuffix("-forward") + " *" * figures.disturbed(row)
    bars = "; ".join(f"{bar}: {MARK[met]}" for bar, met in figures.verdicts(document, row))
    return [name, row["mode"], *map(milliseconds, COLUMNS),
            f"{figures.gain(row, against):.2f}× {against}", f"{megabytes('fused')} ({megabytes(against)})",
            f"{three_digits(rate)} {unit}", ", ".join(f"{part:.0%} {name}" for name, part in parts.items()), bars]  # fmt: skip


def notes(document):
    """What the table can't hold: the roofs, providers without a column, and what was left out."""
    lines = [f"{dtype}: " + ", ".join(f"{name} 2048³ {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items())
             for dtype, rates in document["gemm"].items()]  # fmt: skip
    for row in document["rows"]:
        more = [f"{name} {three_digits(t * 1e3)} ms" for name, t in row["median"].items() if name not in COLUMNS]
        more += [f"{name} {why}" for name, why in row["left out"].items()]
        if more:
            lines.append(f"{row['name']}: " + ", ".join(more))
    missed = [
        row["name"] for row in document["rows"] if any(met is False for _, met in figures.verdicts(document, row))
    ]
    bars = [met for row in document["rows"] for _, met in figures.verdicts(document, row)]
    lines.append(
        f"{sum(map(bool, bars))} of {len(bars)} bars met" + (f"; missed in {', '.join(missed)}" if missed else "")
    )
    if document["no kernel"]:
        lines.append(f"no kernel on {document['device']} in this build: {', '.join(document['no kernel'])}")
    if any(map(figures.disturbed, document["rows"])):
        lines.append(f"*: others used more than {figures.BUSY} core while this row was measured; not to be quoted")
    if not document["full"]:
        lines.append("The quick set: without --full the paper's model, bf16, dropouts on the state, varied lengths and "
                     "whole loops compiled are left out.")  # fmt: skip
    return lines


def markdown(document):
    table = [HEAD, ["---"] * len(HEAD), *(cells(document, row) for row in document["rows"])]
    lines = ["| " + " | ".join(line) + " |" for line in table]
    return "\n".join(
        [*(f"{line}  " for line in heading(document)), "", *lines, "", *(f"- {note}" for note in notes(document))]
    )


def plain(document):
    table = [HEAD, *(cells(document, row) for row in document["rows"])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
    )


def show(document):
    """The table on the screen, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(document))
    else:
        table = Table(*HEAD, title=f"{'full' if document['full'] else 'quick'} set on {document['device']}: medians")
        table.columns[0].no_wrap = True
        for row in document["rows"]:
            missed = any(met is False for _, met in figures.verdicts(document, row))
            table.add_row(*cells(document, row), style="red" if missed else None)
        # Into a file or a pipe as wide as need be, instead of folded at 80 columns.
        Console(width=None if sys.stdout.isatty() else max(240, shutil.get_terminal_size().columns)).print(table)
    print("\n".join([*heading(document), *notes(document)]))


def compare(old, new, threshold):
    """Prints what got slower by more than `threshold`; returns whether anything did."""
    if old["machine"]["cpu"] != new["machine"]["cpu"] or old["machine"]["gpu"] != new["machine"]["gpu"]:
        print(f"compared with another machine: {old['machine']['gpu'] or old['machine']['cpu']}")
    lines, alone = figures.slower(old, new, threshold)
    for name, before, after, ratio in lines:
        print(f"slower: {name}: {three_digits(before * 1e3)} ms -> {three_digits(after * 1e3)} ms, {ratio - 1:+.0%}")
    for name in alone:
        print(f"in one of the two results only: {name}")
    if not lines:
        print(f"nothing is more than {threshold:.0%} slower than before")
    return bool(lines)


def finish(document, out, name, old, threshold):
    """Shows the result, writes it to out/name.json and .png; returns whether something got slower than in file `old`."""
    old = json.loads(Path(old).read_text()) if old else None  # before it's overwritten, which it may be
    show(document)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {out / name}.json" + picture(document, out / f"{name}.png"))
    return compare(old, document, threshold) if old else False


def picture(document, path):
    """Draws the result; a word on what became of it, as not everyone has matplotlib."""
    try:
        from bench import chart
    except ImportError:
        return "; no picture, as matplotlib is not installed"
    chart.draw(document, path)
    return f", {path.name}"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--markdown", action="store_true", help="the table for a README")
    parser.add_argument("--png", type=Path, help="draw the picture into this file")
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="say what got slower since; exit code 1 if anything did"
    )
    parser.add_argument("--threshold", type=float, default=0.1, help="how much slower is slower (0.1: 10 %%)")
    args = parser.parse_args(argv)
    document = json.loads(args.result.read_text())
    print(markdown(document)) if args.markdown else show(document)
    if args.png:
        print(picture(document, args.png).lstrip(";, "))
    return int(bool(args.compare) and compare(json.loads(args.compare.read_text()), document, args.threshold))


if __name__ == "__main__":
    sys.exit(main())
