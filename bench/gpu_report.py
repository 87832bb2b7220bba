"""What the timings on a GPU say: a table in Markdown with every bar, measured or not. Nothing here is measured.

python -m bench.gpu_report [RESULT.json]        without one: the bars, each "not measured"
"""

import argparse
import json
import sys
from pathlib import Path

from bench import gpu_cases, report
from bench.report import MARK, three_digits

# Seconds of one exchange of activations between the SMs of a persistent kernel: an estimate (persistent.md, 6), not measured.
EXCHANGE = 0.8e-6
HEAD = ["case", "mode", "fused µs: graph", "L2 cold", "call", "µs/step", "of limit", "gain over the best", "bars"]


def median(row, provider, way):
    """Seconds, or None where that was not measured."""
    return row["times"].get(provider, {}).get(way, {}).get("median") if row else None


def limit(case, ceilings):
    """(the least seconds the call can take on this card, what limits it); None without ceilings."""
    row, passes = case.row, 3 if case.row.backward else 1
    dtype = str(row.dtype)[6:]
    if not ceilings or dtype not in ceilings:
        return None
    arithmetic = row.flops * passes / ceilings[dtype]
    if case.exchanges:  # the weights stay in the SMs, so bytes do not count
        exchanges = case.exchanges * case.steps * (2 if row.backward else 1) * EXCHANGE
        return arithmetic + exchanges, "exchanges and FLOPs"
    bytes_ = row.traffic * row.dtype.itemsize / ceilings["copy"]
    return max((arithmetic, "FLOPs"), (bytes_, "bytes"))


def fastest(row, providers, way):
    """(the name of the fastest of these providers, its seconds), or (None, None)."""
    found = {name: median(row, name, way) for name in providers}
    known = {name: t for name, t in found.items() if t}
    name = min(known, key=known.get, default=None)
    return name, known.get(name)


def verdict(bar, case, row, ceilings):
    """(the bar in words, what was found in words, met or None where it was not measured)"""
    ours = median(row, "fused", bar.way)
    how = {"call": ", as called", "graph": "", "cold": ", L2 cold"}[bar.way]
    if bar.against in ("us", "us per step"):
        steps = case.steps if bar.against == "us per step" else 1
        words = f"≤ {bar.figure:.3g} µs{' per step' * (steps > 1)}{how}"
        return (
            (words, three_digits(ours / steps * 1e6), ours / steps * 1e6 <= bar.figure) if ours else (words, "", None)
        )
    if bar.against == "copy":
        words = f"≥ {bar.figure:.0%} of copy{how}"
        if not ours or not ceilings:
            return words, "", None
        part = case.row.traffic * case.row.dtype.itemsize / ours / ceilings["copy"]
        return words, f"{part:.0%}", part >= bar.figure
    names = bar.against.removeprefix("best of ").split(", ")
    name, theirs = fastest(row, names, bar.way)
    words = f"≥ {bar.figure:g}× {'the best peer' if len(names) > 1 else bar.against}{how}"
    if not ours or not theirs:
        return words, "", None
    return words, f"{theirs / ours:.2f}×{f' ({name})' * (len(names) > 1)}", theirs / ours >= bar.figure


def microseconds(seconds):
    return three_digits(seconds * 1e6) if seconds else ""


def cells(case, row, ceilings, why):
    """The case's cells under HEAD; `why`: there is no row."""
    ours, least = median(row, "fused", "graph"), limit(case, ceilings)
    way = "graph" if ours else "call"
    ours = ours or median(row, "fused", "call")
    name, theirs = fastest(row, [n for n in row["times"] if n != "fused"], way) if row else (None, None)
    bars = [verdict(bar, case, row, ceilings) for bar in case.bars]
    said = "; ".join(f"{words}: {found + ', ' if found else ''}{MARK[met]}" for words, found, met in bars)
    cold = median(row, "fused", "cold") or ours
    return [case.name, case.row.mode, *(microseconds(median(row, "fused", way)) for way in ("graph", "cold", "call")),
            microseconds(ours / case.steps) if ours and case.steps else "",
            f"{least[0] / cold:.0%} of {least[1]}" if cold and least else "",
            f"{theirs / ours:.2f}× {name}" if ours and theirs else "", said + (f" ({why})" if why else "")]  # fmt: skip


def markdown(document):
    """The whole of a result."""
    rows = {row["name"]: row for row in document.get("rows", [])}
    rehearsal, failed, ceilings = document.get("rehearsal"), document.get("failed", {}), document.get("ceilings")
    if rehearsal:  # no bar is of its sizes
        rows, ceilings = {}, None
    cases = gpu_cases.listed()
    table = [HEAD, ["---"] * len(HEAD)]
    table += [cells(case, rows.get(case.name), ceilings, failed.get(case.name)) for case in cases]
    verdicts = [verdict(bar, case, rows.get(case.name), ceilings)[2] for case in cases for bar in case.bars]
    lines = report.heading(document["facts"]) if "facts" in document else []
    lines += ["A REHEARSAL ON A CPU, at tiny sizes: nothing here was measured"] if rehearsal else []
    lines += [
        *before(document),
        f"{sum(map(bool, verdicts))} of {len(verdicts)} bars met, {verdicts.count(None)} not measured",
    ]
    return "\n".join([*(f"{line}  " for line in lines), "",
                      *("| " + " | ".join(line) + " |" for line in table), "", *notes(document.get("rows", []))]) + "\n"  # fmt: skip


def before(document):
    """Lines on the ceilings, and on the tests and the sanitizer where the result has them."""
    lines = []
    if c := document.get("ceilings"):
        rates = ", ".join(f"{name} {c[name] / 1e12:.3g} TFLOP/s" for name in ("bfloat16", "float16", "float32"))
        lines.append(f"measured: copy {c['copy'] / 1e12:.3g} TB/s, {rates}; events alone {c['events'] * 1e6:.1f} µs; "
                     f"an exchange is taken to be {EXCHANGE * 1e6:g} µs, an estimate")  # fmt: skip
    for part in document.get("parts", []):
        lines.append(
            f"{part['name']}: {part['what']}, {part['seconds']:.0f} s{'; ' + part['said'] if part['said'] else ''}"
        )
    return lines


def notes(rows):
    """Of each row every provider and what was left out."""
    for row in rows:
        words = [f"{provider} " + " / ".join(f"{way} {microseconds(t['median'])}" for way, t in by.items())
                 for provider, by in row["times"].items()]  # fmt: skip
        words += [f"{provider}: {why}" for provider, why in row["left out"].items()]
        yield f"- {row['name']}: " + "; ".join(words) + (f"; {row['explain']}" if "explain" in row else "")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_report", description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path, nargs="?")
    args = parser.parse_args(argv)
    print(markdown(json.loads(args.result.read_text()) if args.result else {}), end="")


if __name__ == "__main__":
    sys.exit(main())
