"""Shows a result file as a table, in Markdown or as a picture, and compares two results.

python -m bench.suite.report RESULT.json [--markdown] [--png FILE] [--compare OLD.json]
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from bench.suite import metrics

COLUMNS = ("fused", "eager", "compiled", "torch")  # the providers with a column of their own
HEAD = [
    "case",
    "mode",
    *(f"{name} ms" for name in COLUMNS),
    "gain, MKL unthrottled",
    "gain",
    "peak MB (baseline)",
    "rate",
    "of roofline limit",
    "target",
]
MARK = {True: "met", False: "MISSED", None: "not measured"}


def heading(result, load=None):
    """Returns lines that describe the machine and the versions.

    load: as `machine.load` returns it, to warn when other processes are busy
    """
    machine, versions = result["machine"], result["versions"]
    modified = " + changes" * result["dirty"]
    lines = [
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, "
        f"{machine['threads']} threads, instruction set of the kernels "
        f"{machine['isa'] or 'unknown'} (torch: {machine['torch isa']}), {machine['system']}",
        ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        + f", commit {(result['commit'] or 'unknown')[:12]}{modified}, {result['date']}",
    ]
    if result.get("mkl") == "unthrottled":
        lines.append("MKL unthrottled: it takes its AVX-512 kernels on this AMD processor too")
    if load:
        average, busy = load
        known = None not in load
        lines.append(
            f"load average {average:.2f}; other processes use {busy:.2f} cores"
            if known
            else "load unknown"
        )
        if (busy or 0.0) > metrics.BUSY:
            lines.append("WARNING: other processes are busy; do not quote these times")
    return lines


def three_digits(x):
    """Formats a number with three significant digits and without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def unthrottled_gain(lifted):
    """Returns the gain of an entry whose baselines ran with MKL unthrottled, as text; None: ""."""
    if not lifted:
        return ""
    against = metrics.baseline(lifted)
    gain = metrics.gain(lifted, against)
    return "" if gain is None else f"{gain:.2f}× {against}"


def cells(result, entry, lifted=None):
    """Returns the entry's cells under HEAD. lifted: the entry of a run with MKL unthrottled."""
    ms, memory, against = entry["median"], entry["memory"], metrics.baseline(entry)

    def milliseconds(name):
        return three_digits(ms[name] * 1e3) if name in ms else entry["left out"].get(name, "")

    def megabytes(name):
        return "?" if memory.get(name) is None else three_digits(memory[name] / 1e6)

    rate, unit = metrics.rate(entry)
    fractions = metrics.fractions_of_roofline(result, entry)
    verdicts = metrics.verdicts(result, entry)
    return [
        entry["name"].removesuffix("-forward") + metrics.marked(entry, lifted),
        entry["mode"],
        *map(milliseconds, COLUMNS),
        unthrottled_gain(lifted or metrics.unthrottled(entry)),
        f"{metrics.gain(entry, against):.2f}× {against}",
        f"{megabytes('fused')} ({megabytes(against)})",
        f"{three_digits(rate)} {unit}",
        ", ".join(f"{fraction:.0%} {name}" for name, fraction in fractions.items()),
        "; ".join(f"{target}: {MARK[met]}" for target, met in verdicts),
    ]


def notes(result):
    """Returns what the table has no column for: GEMM rates, further providers, missed targets."""
    lines = [
        f"{dtype}: "
        + ", ".join(f"{name} 2048³ {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items())
        for dtype, rates in result["gemm"].items()
    ]
    for entry in result["rows"]:
        more = [
            f"{name} {three_digits(t * 1e3)} ms"
            for name, t in entry["median"].items()
            if name not in COLUMNS and not name.endswith(metrics.UNTHROTTLED)
        ]
        more += [f"{name} {reason}" for name, reason in entry["left out"].items()]
        if more:
            lines.append(f"{entry['name']}: " + ", ".join(more))
    lines.append(targets_met([(result, entry) for entry in result["rows"]]))
    if result["no kernel"]:
        names = ", ".join(result["no kernel"])
        lines.append(f"no kernel on {result['device']} in this build: {names}")
    if any(map(metrics.disturbed, result["rows"])):
        lines.append(
            f"*: other processes used more than {metrics.BUSY} core while this case was measured; "
            "do not quote its times"
        )
    if any(map(metrics.far_apart, result["rows"])):
        lines.append(
            "‡: the first and the last core shared no cache most of the time of this case: a cache "
            f"line took more than {metrics.FAR} ns from one to the other"
        )
    if not result["full"]:
        lines.append(
            "This is the quick set: --full adds the Mogrifier paper's model, bf16, dropouts on the "
            "state, varying lengths and loops compiled as a whole."
        )
    return lines


def targets_met(pairs):
    """Returns one sentence on the targets of these (result, entry) pairs."""
    verdicts = [(entry["name"], metrics.verdicts(result, entry)) for result, entry in pairs]
    met = [met for _, targets in verdicts for _, met in targets]
    missed = [name for name, targets in verdicts if any(met is False for _, met in targets)]
    where = f"; missed in {', '.join(missed)}" if missed else ""
    return f"{sum(map(bool, met))} of {len(met)} targets met{where}"


def markdown_table(lines):
    """Formats lists of cells, the head first, as a table in Markdown."""
    head, *others = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *others])


def markdown(result):
    table = markdown_table([HEAD, *(cells(result, entry) for entry in result["rows"])])
    head = [f"{line}  " for line in heading(result)]
    return "\n".join([*head, "", table, "", *(f"- {note}" for note in notes(result))])


def plain(result):
    table = [HEAD, *(cells(result, entry) for entry in result["rows"])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    )


def show(result):
    """Prints the table, with rich if it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(result))
    else:
        title = f"{'full' if result['full'] else 'quick'} set on {result['device']}: medians"
        table = Table(*HEAD, title=title)
        table.columns[0].no_wrap = True
        for entry in result["rows"]:
            missed = any(met is False for _, met in metrics.verdicts(result, entry))
            table.add_row(*cells(result, entry), style="red" if missed else None)
        # A file or a pipe gets wide lines, instead of lines folded at 80 columns.
        wide = max(240, shutil.get_terminal_size().columns)
        Console(width=None if sys.stdout.isatty() else wide).print(table)
    print("\n".join([*heading(result), *notes(result)]))


def compare(old, new, threshold):
    """Prints what became slower by more than `threshold`; returns whether anything did."""
    if any(old["machine"][part] != new["machine"][part] for part in ("cpu", "gpu")):
        print(f"compared with another machine: {old['machine']['gpu'] or old['machine']['cpu']}")
    for part in ("threads", "isa"):
        if (before := old["machine"].get(part)) != new["machine"].get(part):
            print(f"compared with other {part}: {before}")
    lines, unmatched = metrics.slower(old, new, threshold)
    for name, before, after, ratio in lines:
        times = f"{three_digits(before * 1e3)} ms -> {three_digits(after * 1e3)} ms"
        print(f"slower: {name}: {times}, {ratio - 1:+.0%}")
    for name in unmatched:
        print(f"in one of the two results only: {name}")
    if not lines:
        print(f"nothing is more than {threshold:.0%} slower than before")
    return bool(lines)


def finish(result, out, name, old, threshold):
    """Writes the result to out/name.json, shows it, and draws it into out/name.png.

    Returns whether something is slower than in the file `old`, which may be the file that is
    written.
    """
    old = json.loads(Path(old).read_text()) if old else None
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    print(f"written: {out / name}.json" + picture(result, out / f"{name}.png"))
    return compare(old, result, threshold) if old else False


def picture(result, path):
    """Draws the result into the file; returns a remark for the list of written files."""
    try:
        from bench.suite import chart
    except ImportError:
        return "; no picture, because matplotlib is not installed"
    chart.draw(result, heading(result), path)
    return f", {path.name}"


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m bench.suite.report", description=__doc__.split("\n")[0]
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument("--png", type=Path, help="draw the picture into this file")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="OLD.json",
        help="report what became slower since; exit code 1 if anything did",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.1,
        help="how much longer a case may take before it counts as slower (0.1: 10 %%)",
    )
    args = parser.parse_args(argv)
    result = json.loads(args.result.read_text())
    if "peers" in result:
        from bench.peers import page  # which imports this module

        print("\n\n".join(["\n".join(heading(result)), *page.tables(result["rows"])]))
        return 0
    print(markdown(result)) if args.markdown else show(result)
    if args.png:
        print(picture(result, args.png).lstrip(";, "))
    return int(
        bool(args.compare) and compare(json.loads(args.compare.read_text()), result, args.threshold)
    )


if __name__ == "__main__":
    sys.exit(main())
