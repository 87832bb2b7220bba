"""Prints the times of a GPU result as a table in Markdown, with every target, measured or not.

python -m bench.gpu.report [RESULT.json]        without a result every target is "not measured"
"""

import argparse
import json
import sys
from pathlib import Path

from bench.gpu.cases import gpu_cases
from bench.suite import report
from bench.suite.report import MARK, three_digits

# Seconds of one exchange of activations between the SMs of a persistent kernel, and of one launch
# in a CUDA graph of kernels that wait for each other: estimates, not measured.
EXCHANGE = 0.8e-6
LAUNCH = 2.5e-6
HEAD = [
    "case",
    "mode",
    "fused µs: graph",
    "L2 cold",
    "call",
    "µs/step",
    "of limit",
    "gain over the best",
    "targets",
]
WORDS_OF_WAY = {"call": ", as called", "graph": "", "cold": ", L2 cold"}


def median(entry, provider, way):
    """Returns seconds, or None if that was not measured."""
    return entry["times"].get(provider, {}).get(way, {}).get("median") if entry else None


def least_time(case, ceilings):
    """Returns the least seconds that the call can take here, and what limits it, or None."""
    benchmark, passes = case.benchmark, 3 if case.benchmark.backward else 1
    dtype = str(benchmark.dtype)[6:]
    if not ceilings or dtype not in ceilings:
        return None
    arithmetic = benchmark.flops * passes / ceilings[dtype]
    if case.exchanges:  # the weights are resident in the SMs, so their bytes do not count
        exchanges = case.exchanges * case.steps * (2 if benchmark.backward else 1) * EXCHANGE
        return arithmetic + exchanges, "exchanges and FLOPs"
    traffic = benchmark.traffic * benchmark.dtype.itemsize / ceilings["copy"]
    seconds, reason = max((arithmetic, "FLOPs"), (traffic, "bytes"))
    if case.launches:  # nothing else runs between two of them
        launches = case.launches * case.steps * (2 if benchmark.backward else 1) * LAUNCH
        return seconds + launches, f"launches and {reason}"
    return seconds, reason


def fastest(entry, providers, way):
    """Returns the name of the fastest of these providers and its seconds, or (None, None)."""
    found = {name: median(entry, name, way) for name in providers}
    known = {name: t for name, t in found.items() if t}
    name = min(known, key=known.get, default=None)
    return name, known.get(name)


def verdict(target, case, entry, ceilings):
    """Returns the target in words, the measured value in words, and whether the target is met.

    The last is None if the target was not measured.
    """
    if target.against in ("us", "us per step"):
        return verdict_on_time(target, case, entry)
    if target.against == "copy":
        return verdict_on_bandwidth(target, case, entry, ceilings)
    ours = median(entry, "fused", target.way)
    names = target.against.removeprefix("best of ").split(", ")
    name, theirs = fastest(entry, names, target.way)
    rival = "the best peer" if len(names) > 1 else target.against
    words = f"≥ {target.value:g}× {rival}{WORDS_OF_WAY[target.way]}"
    if not ours or not theirs:
        return words, "", None
    gain = theirs / ours
    return words, f"{gain:.2f}×{f' ({name})' * (len(names) > 1)}", gain >= target.value


def verdict_on_time(target, case, entry):
    ours = median(entry, "fused", target.way)
    steps = case.steps if target.against == "us per step" else 1
    per_step = " per step" * (steps > 1)
    words = f"≤ {target.value:.3g} µs{per_step}{WORDS_OF_WAY[target.way]}"
    if not ours:
        return words, "", None
    microseconds = ours / steps * 1e6
    return words, three_digits(microseconds), microseconds <= target.value


def verdict_on_bandwidth(target, case, entry, ceilings):
    ours = median(entry, "fused", target.way)
    words = f"≥ {target.value:.0%} of copy{WORDS_OF_WAY[target.way]}"
    if not ours or not ceilings:
        return words, "", None
    traffic = case.benchmark.traffic * case.benchmark.dtype.itemsize
    fraction = traffic / ours / ceilings["copy"]
    return words, f"{fraction:.0%}", fraction >= target.value


def microseconds(seconds):
    return three_digits(seconds * 1e6) if seconds else ""


def cells(case, entry, ceilings, failure):
    """Returns the case's cells under HEAD; failure: why there is no entry, or None."""
    way = "graph" if median(entry, "fused", "graph") else "call"
    ours, least = median(entry, "fused", way), least_time(case, ceilings)
    others = [name for name in entry["times"] if name != "fused"] if entry else []
    name, theirs = fastest(entry, others, way)
    verdicts = [verdict(target, case, entry, ceilings) for target in case.targets]
    targets = "; ".join(
        f"{words}: {found + ', ' if found else ''}{MARK[met]}" for words, found, met in verdicts
    )
    cold = median(entry, "fused", "cold") or ours
    return [
        case.name,
        case.benchmark.mode,
        *(microseconds(median(entry, "fused", way)) for way in ("graph", "cold", "call")),
        microseconds(ours / case.steps) if ours and case.steps else "",
        f"{least[0] / cold:.0%} of {least[1]}" if cold and least else "",
        f"{theirs / ours:.2f}× {name}" if ours and theirs else "",
        targets + (f" ({failure})" if failure else ""),
    ]


def markdown(result):
    """Formats a whole result; {} for none."""
    entries = {entry["name"]: entry for entry in result.get("rows", [])}
    failed, ceilings = result.get("failed", {}), result.get("ceilings")
    rehearsal = result.get("rehearsal")
    if rehearsal:  # the targets are for the real sizes
        entries, ceilings = {}, None
    cases = gpu_cases()
    table = report.markdown_table(
        [HEAD]
        + [cells(case, entries.get(case.name), ceilings, failed.get(case.name)) for case in cases]
    )
    met = [
        verdict(target, case, entries.get(case.name), ceilings)[2]
        for case in cases
        for target in case.targets
    ]
    lines = report.heading(result["facts"]) if "facts" in result else []
    lines += ["A REHEARSAL ON A CPU at tiny sizes: nothing here was measured"] if rehearsal else []
    lines += [
        *describe_parts(result),
        f"{sum(map(bool, met))} of {len(met)} targets met, {met.count(None)} not measured",
    ]
    head = [f"{line}  " for line in lines]
    return "\n".join([*head, "", table, "", *notes(result.get("rows", []))]) + "\n"


def describe_parts(result):
    """Returns lines on the ceilings and on the parts of `make gpu`, where the result has them."""
    lines = []
    if c := result.get("ceilings"):
        rates = ", ".join(
            f"{name} {c[name] / 1e12:.3g} TFLOP/s" for name in ("bfloat16", "float16", "float32")
        )
        lines.append(
            f"measured: copy {c['copy'] / 1e12:.3g} TB/s, {rates}; "
            f"empty event pair {c['events'] * 1e6:.1f} µs; "
            f"an exchange is assumed to take {EXCHANGE * 1e6:g} µs and a launch "
            f"{LAUNCH * 1e6:g} µs, both estimates"
        )
    for part in result.get("parts", []):
        output = f"; {part['said']}" if part["said"] else ""
        lines.append(f"{part['name']}: {part['what']}, {part['seconds']:.0f} s{output}")
    return lines


def notes(entries):
    """Yields for each entry the times of every provider, and what was left out."""
    for entry in entries:
        words = [
            f"{provider} "
            + " / ".join(f"{way} {microseconds(t['median'])}" for way, t in by_way.items())
            for provider, by_way in entry["times"].items()
        ]
        words += [f"{provider}: {reason}" for provider, reason in entry["left out"].items()]
        words += [entry["explain"]] if "explain" in entry else []
        yield f"- {entry['name']}: {'; '.join(words)}"


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.report", description=__doc__.split("\n")[0]
    )
    parser.add_argument("result", type=Path, nargs="?")
    args = parser.parse_args(argv)
    print(markdown(json.loads(args.result.read_text()) if args.result else {}), end="")


if __name__ == "__main__":
    sys.exit(main())
