"""The table of the targets that a machine missed, beside the gain that its limits allow."""

from bench.suite import measurements, metrics, report, step_shares, unthrottled_targets
from bench.training import speed

MISSED = """## Targets that are missed, and why

Baselines are as installed, or with MKL unthrottled. The limit is the gain that the case would have
if it took no more time than the roofline limit allows: than its products at the rate of the fastest
product of two 2048 × 2048 matrices of that run, or than the copy of a tensor of its size. The
column after it says at which part of that rate the whole case, with all that is not a product or a
copy, would have to run to meet the target. The last column, of training steps that were profiled,
is the gain of a fused step that consists of nothing but its products, as fast as they are, and in
brackets which part of such a step's speed the target needs; see "Where the time of a training step
goes".
"""


def section(machine):
    """Returns the table of the gains below their targets, beside the gain at the roofline limit."""
    head = ["case", "baselines", "gain", "target", "limit", "target, of the limit"]
    lines = [[*head, "limit, products as measured"]]
    # What a fused step consists of does not depend on MKL, which it does not call.
    steps = {name: row for of_mode in machine.steps.values() for name, (_, row) in of_mode.items()}
    cases, presets = machine.cases, machine.presets
    lines += missed_lines("as installed", cases["as-installed"], own_targets, steps)
    lines += missed_lines("unthrottled", cases["unthrottled"], unthrottled_target, steps)
    lines += missed_lines("bf16", machine.bf16, own_targets, steps)
    lines += missed_presets("as installed", presets["as-installed"], "as-installed", steps)
    lines += missed_presets("unthrottled", presets["unthrottled"], "unthrottled", steps)
    lines += missed_presets("bf16", machine.bf16_presets, "as-installed", steps)
    if len(lines) == 1:
        return []
    return [MISSED, report.markdown_table(lines)]


def missed_presets(baselines, pairs, mode, steps):
    """Returns a line for each training step below its target; only profiled steps have limits.

    baselines: how they ran    pairs: {preset: (result, entry)}    mode: of MKL
    steps: {case: row of a profile}
    """
    return [
        [
            preset,
            baselines,
            f"{ratio:.2f}× {other}",
            f"{target:g}×",
            *step_limits(steps.get(preset + "-bfloat16" * ("bf16" in name)), ratio, target),
        ]
        for preset, (_, entry) in pairs.items()
        for target, other, met in speed.verdicts(preset, entry, mode)
        for name, ratio in entry["ratio"].items()
        if met is False and name.endswith(f" / {other}")
    ]


def step_limits(row, gain, target):
    """Returns the last three cells of a missed step's line; row: of its profile, or None"""
    if row is None:
        return ["", "", ""]
    measured, fastest = (step_shares.limits(row, gain)[name] for name in step_shares.LIMITS)
    return [
        f"{fastest:.2f}×",
        f"{target / fastest:.0%}",
        f"{measured:.2f}× ({target / measured:.0%})",
    ]


def own_targets(entry):
    """Returns [(provider, target)] of the case itself, of gains alone."""
    return [(name, value) for name, value in entry["bars"] if name in entry["median"]]


def unthrottled_target(entry):
    """Returns [(provider, target)] over the faster baseline with MKL unthrottled."""
    return [(measurements.speedup(entry)[1], unthrottled_targets.of_entry(entry))]


def missed_lines(baselines, pairs, targets, steps):
    """Returns a line for each gain below its target.

    baselines: how they ran    pairs: {case name: (result, entry)}
    targets: entry -> [(provider, target)]    steps: {case name: row of a profile}
    """
    lines = []
    for name, (result, entry) in pairs.items():
        # Of the highest limit, which is none for a kernel that leaves out products of masked keys.
        reached = min(metrics.fractions_of_roofline(result, entry).values())
        for provider, target in targets(entry):
            gain = metrics.gain(entry, provider)
            if gain < target:
                limits = ["", ""]
                if reached < 1:
                    limits = [f"{gain / reached:.2f}×", f"{target * reached / gain:.0%}"]
                cells = [baselines, f"{gain:.2f}× {provider}", f"{target:g}×", *limits]
                lines.append([name, *cells, step_limits(steps.get(name), gain, target)[-1]])
    return lines
