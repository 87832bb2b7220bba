"""Where the time of a training step goes, and the limits of its gain that follow.

torch's profiler records the operators that the training thread calls. The time of an operator
without those that it calls in turn is the wall time that the step spends in it, on however many
threads it runs. What no operator takes is time of Python and belongs to the rest.
"""

import re
from collections import Counter

from fusedseq.fused.flops import FORMULAS, nothing

from bench.suite import measurements, metrics, report

MULTIPLIES = [
    op for op, (count, _) in FORMULAS.items() if count is not nothing and op != "attention"
]
OF_OPERATOR = (  # (group, pattern of an operator's whole name)
    ("products", rf"fusedseq::({'|'.join(MULTIPLIES)})(_backward)?"),
    ("products", r"aten::(mm|addmm|bmm|baddbmm|addmv|mv|mkldnn_\w+)|mkldnn::\w*linear\w*"),
    ("attention", r"fusedseq::attention\w*|aten::_?scaled_dot_product\w*"),
    ("optimizer", r"fusedseq::nt_asgd\w*|aten::_(fused|foreach)_\w+|Optimizer\..*"),
    ("pointwise", r"fusedseq::\w+"),
)
GROUPS = ("products", "attention", "pointwise", "optimizer", "the rest")
LIMITS = ("products as measured", "products at the best rate")
TITLE = """## Where the time of a training step goes

The milliseconds of a training step in fusedseq and, after the slash, in the PyTorch model that its
gain is over, by torch's profiler. An operator that multiplies matrices counts as products with all
that it computes: a recurrence with its gates, the output layer's loss with its softmax.
"pointwise" are the other fused operators, "the rest" are torch's other operators, autograd and
Python. Attention that is not a single operator is among the products and the rest.

The limits are what the gain of this run would be if a fused step consisted of nothing but its
products: as fast as they are measured here, or with all their operations at the rate of the fastest
product of two 2048 × 2048 matrices. `python -m bench.suite.step_profile` measures this.
"""


def group(name):
    """Returns the group of an event of the profiler."""
    return next((g for g, pattern in OF_OPERATOR if re.fullmatch(pattern, name)), GROUPS[-1])


def grouped(events, wall):
    """Returns {group: time}, which add up to the wall time.

    events: {name: time without the operators that it calls}, in the unit of `wall`
    """
    found = Counter(dict.fromkeys(GROUPS, 0.0))
    for name, time in events.items():
        found[group(name)] += time
    found[GROUPS[-1]] += wall - sum(events.values())
    return dict(found)


def gain(row):
    """Returns how many times as fast as the baseline's step the fused step was."""
    return sum(row["baseline"]["ms"].values()) / sum(row["fused"]["ms"].values())


def limits(row, gain):
    """Returns {name of LIMITS: what a gain of the fused step becomes if its products are all}.

    row: of a profile    gain: over any baseline, measured in this run or in another one
    """
    ms = row["fused"]["ms"]
    fastest = 1e3 * row["operations"] / row["rate"]
    times = dict(zip(LIMITS, (ms["products"], fastest), strict=True))
    return {name: gain * sum(ms.values()) / time for name, time in times.items()}


def lines(profiles):
    """Returns the table's rows as lists of cells; profiles: {MKL mode: {case: (result, row)}}"""
    found = []
    for mode, pairs in profiles.items():
        for name, (_, row) in pairs.items():
            ours, theirs = (row[side]["ms"] for side in ("fused", "baseline"))
            both = [(sum(ours.values()), sum(theirs.values()))]
            both += [(ours[g], theirs[g]) for g in GROUPS]
            cells = [" / ".join(map(report.three_digits, pair)) for pair in both]
            reached = limits(row, gain(row))
            shown = [f"{gain(row):.2f}×", *(f"{reached[name]:.2f}×" for name in LIMITS)]
            case = name + " *" * metrics.disturbed(row)
            found.append([case, mode.replace("-", " "), *cells, *shown])
    return found


def section(profiles):
    """Returns the parts of a machine's page about its profiles."""
    head = ["case", "MKL", "step", *GROUPS, "gain", *(f"limit, {name}" for name in LIMITS)]
    results = {
        result["date"]: result for of_mode in profiles.values() for result, _ in of_mode.values()
    }
    measured = dict.fromkeys(
        f"{date[:10]} at commit {measurements.commit(result)}"
        for date, result in sorted(results.items())
    )
    return [
        TITLE,
        report.markdown_table([head, *lines(profiles)]),
        f"Measured on {', '.join(measured)}.",
    ]
