"""Metrics of a result's entries, computed from the recorded medians: nothing here is measured.

`result` is the content of a result file, `entry` an element of result["rows"], which has the name,
the times and the targets (under the key "bars") of one benchmark case.
"""

import statistics

BASELINES = (
    "eager",
    "torch",
)  # the gain is over the faster of these, unless a target names another
MEMORY = "memory of "  # prefix of a target on the peak memory of a provider
UNTHROTTLED = ", MKL unthrottled"  # suffix of a baseline that the second process has timed
BUSY = 0.1  # cores: if other processes use more, an entry counts as disturbed
FAR = 100  # nanoseconds: if a cache line takes longer from core to core, they share no cache


def gain(entry, against):
    """Returns how many times as fast as a provider `fused` is; None if that was left out."""
    median = entry["median"]
    return median[against] / median["fused"] if against in median else None


def unthrottled(entry):
    """Returns the entry with the baselines of the second process in place of those with MKL as
    installed; None if there was no second process."""
    median = entry["median"]
    baselines = {
        name.removesuffix(UNTHROTTLED): t
        for name, t in median.items()
        if name.endswith(UNTHROTTLED)
    }
    return {**entry, "median": {"fused": median["fused"], **baselines}} if baselines else None


def baseline(entry):
    """Returns the provider over which the gain is reported: the first target's, or the faster of
    BASELINES.
    """
    named = [
        against
        for against, _ in entry["bars"]
        if against != "roof" and not against.startswith(MEMORY)
    ]
    present = [name for name in BASELINES if name in entry["median"]]
    return named[0] if named else min(present, key=entry["median"].get)


def rate(entry):
    """Returns the rate of `fused` and its unit: GFLOP/s, or GB/s of the least traffic."""
    if entry["roof"]:
        return entry["bytes"] / entry["median"]["fused"] / 1e9, "GB/s"
    return entry["flops"] / entry["median"]["fused"] / 1e9, "GFLOP/s"


def roofline_limits(result, entry):
    """Returns {name: rate} of the roofline limits in `rate`'s unit; targets mean the first."""
    if entry["roof"]:
        rounds = sorted(entry["roof"]["rounds"])
        median = rounds[len(rounds) // 2]
        return {entry["roof"]["name"]: entry["roof"]["bytes"] / median / 1e9}
    rates = result["gemm"][f"torch.{entry['dtype']}"]
    return {name: flops / 1e9 for name, flops in rates.items()}


def fractions_of_roofline(result, entry):
    """Returns {name: the fraction of this roofline limit that the fused operator reaches}."""
    limits = roofline_limits(result, entry)
    return {name: rate(entry)[0] / limit for name, limit in limits.items()}


def fraction_of_memory(entry, against):
    """Returns the fused operator's peak memory over a provider's; None if either is unknown."""
    ours, theirs = entry["memory"].get("fused"), entry["memory"].get(against)
    return ours / theirs if ours is not None and theirs else None


def verdicts(result, entry):
    """Returns [(the target as text, met)]; met is None if its provider was left out."""
    found = []
    for against, target in entry["bars"]:
        if against == "roof":
            name, value = next(iter(fractions_of_roofline(result, entry).items()))
            found.append((f"≥ {target:.0%} of {name}", value >= target))
        elif against.startswith(MEMORY):
            value = fraction_of_memory(entry, against.removeprefix(MEMORY))
            met = None if value is None else value <= target
            found.append((f"≤ {target:.0%} of {against}", met))
        else:
            value = gain(entry, against)
            met = None if value is None else value >= target
            found.append((f"≥ {target:g}× {against}", met))
    return found


def disturbed(entry):
    """Returns whether other processes were busy while the entry was measured."""
    return (entry["others busy"] or 0.0) > BUSY


def far_apart(entry):
    """Returns whether the cores shared no cache most of the time; older entries do not say."""
    exchanges = entry.get("line exchange")
    return bool(exchanges) and statistics.median(exchanges) > FAR


def marked(*entries):
    """Returns the marks after the name of a line with these entries, of which some may be None:
    a star if other processes disturbed one, and ‡ if one was measured on cores far apart."""
    known = [entry for entry in entries if entry is not None]
    return " *" * any(map(disturbed, known)) + " ‡" * any(map(far_apart, known))


def slower(old, new, threshold):
    """Compares two results by the name of their entries.

    Returns [(name, old seconds, new seconds, ratio)] of the entries that became slower by more than
    `threshold`, and the names of entries that only one of the results has.
    """
    before, after = (
        {entry["name"]: entry["median"]["fused"] for entry in result["rows"]}
        for result in (old, new)
    )
    both = [
        (name, before[name], after[name], after[name] / before[name])
        for name in before
        if name in after
    ]
    return [line for line in both if line[3] > 1 + threshold], sorted(set(before) ^ set(after))
