"""The tables of bf16 on the page of one machine."""

import statistics

from bench.suite import measurements, metrics, report
from bench.suite.operator_tables import gemm_rates, operator_table
from bench.training import speed

BF16 = """## bf16

The same for bf16 tensors, whose products torch computes with oneDNN, which takes this processor's
instructions for bfloat16 numbers. So do the kernels here, see [precision](../precision.md). MKL
plays no part in these products.
"""
OVER_FP32 = """How many times as fast the fused operator is in bf16 as in fp32, of the cases above
that were measured on this machine in both. Those marked "two runs" were measured at different
times, and their ratio includes what has changed between the two.
"""
# The least of these ratios that is asked for.
TARGETS_OVER_FP32 = {"attention": 1.0, "mogrifier_lstm": 1.55}
# Machines on which the times of two runs cannot be compared.
UNSTEADY = ("intel-xeon-family-6-model-207-2-cores-cpu",)
BF16_TRAINING = """Whole training steps with `training.precision=bf16`, which is bf16 autocast, on
the real texts: `fused:bf16` is the model with the operators of fusedseq, `fused` the same in fp32,
and `baselines:bf16` the model in plain PyTorch under the same autocast.
"""
BF16_LOSSES = """Losses of training steps in bf16 beside those of the same steps in fp32, from the
same weights, with the same batches and masks:
"""


def section(machine):
    """Returns the parts of the page about bf16: operators, their times in fp32, training steps."""
    pairs = [*machine.bf16.values()]
    return [
        BF16,
        operator_table(pairs),
        gemm_sentence(machine),
        report.targets_met(pairs) + ".",
        *over_fp32(machine),
        *bf16_training(machine),
    ]


def gemm_sentence(machine):
    """Returns the rates of the products of two 2048 x 2048 matrices of bfloat16 numbers."""
    rates = gemm_rates(machine.bf16.values(), "torch.bfloat16")
    measured = " and ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    pairs = [*machine.bf16.values()]
    return (
        f"Kernels for {pairs[0][0]['machine']['isa']}. Measured on {measurements.commits(pairs)}. "
        f"Products of two 2048 × 2048 matrices, in GFLOP/s: {measured}."
    )


def over_fp32(machine):
    """Returns the table of our own times in bf16 and in fp32, of the cases with both."""
    if machine.slug in UNSTEADY:
        return []
    lines = [["case", "bf16 ms", "fp32 ms", "fp32 / bf16", "target"]]
    for name, (result, entry) in machine.bf16.items():
        exact = machine.cases["as-installed"].get(name.removesuffix("-bfloat16"))
        if exact is None:
            continue
        ours, theirs = (e["median"]["fused"] for e in (entry, exact[1]))
        target = TARGETS_OVER_FP32.get(entry["op"])
        runs = "" if result["date"] == exact[0]["date"] else ", two runs"
        met = "" if target is None else f"≥ {target:g}×: {report.MARK[theirs / ours >= target]}"
        marks = metrics.marked(entry, exact[1])
        times = [report.three_digits(t * 1e3) for t in (ours, theirs)]
        lines.append([name + marks, *times, f"{theirs / ours:.2f}×{runs}", met])
    return [OVER_FP32, report.markdown_table(lines)] if len(lines) > 1 else []


def bf16_training(machine):
    """Returns the table of training steps in bf16, and how closely they follow those in fp32."""
    parts = []
    entries = {preset: entry for preset, (_, entry) in machine.bf16_presets.items()}
    if entries:
        parts += [BF16_TRAINING, speed.markdown({"rows": entries})]
    lines = [losses_apart(preset, entry) for preset, (_, entry) in machine.bf16_agreements.items()]
    if lines:
        parts += [BF16_LOSSES, "\n".join(lines)]
    return parts


def losses_apart(preset, entry):
    """Returns a sentence on the losses of the same steps in bf16 and in fp32."""
    differences = [abs(a - b) for a, b in entry["losses"]]
    line = (
        f"- {preset}: {entry['steps']} steps, from {entry['losses'][0][0]:.3f} to "
        f"{entry['losses'][-1][0]:.3f} nats; largest difference {entry['largest difference']:.2g} "
        f"at step {entry['at step']}, mean difference {statistics.fmean(differences):.2g}"
    )
    if entry["yardstick"] and entry["ops"][-1] == "fused":
        line += (
            f". Steps in fp32 differ by up to {entry['yardstick']:.2g} from those whose weights "
            "start one rounding away"
        )
    return f"{line}."
