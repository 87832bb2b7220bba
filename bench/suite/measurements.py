"""The committed results of one machine: operators and training steps, for the generated pages.

A machine may have several result files. Of each benchmark case and each preset the newest
measurement counts, separately for MKL as installed and MKL unthrottled. One run may have both.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from bench.suite import machine, metrics, mkl

# A virtual machine may report no more than family and model.
PROCESSORS = {
    "AMD EPYC family 25 model 1": "AMD EPYC (Zen 3)",
    "AMD EPYC family 25 model 17": "AMD EPYC (Zen 4)",
    "AMD EPYC family 26 model 2": "AMD EPYC (Zen 5)",
    "Intel(R) Xeon(R) Processor family 6 model 207": "Intel Xeon (Emerald Rapids)",
    "Intel(R) Xeon(R) Processor family 6 model 167": "Intel Xeon (model 167)",
}
# The machine that the targets were set for is the first of every page, and that of the pictures.
FRONT = "amd-epyc-family-26-model-2-2-cores-cpu"
RESULTS = Path(__file__).parents[1] / "results"


@dataclass
class Measurements:
    """Everything that was measured on one machine.

    slug: the machine's part of the file names
    cases: {MKL mode: {case name: (result, entry)}}, in fp32
    bf16: {case name: (result, entry)}, in bf16 with MKL as installed
    presets: {MKL mode: {preset: (result, entry)}}, of training steps against the baselines
    bf16_presets: {preset: (result, entry)}, of training steps in bf16 against those in fp32
    agreements: {preset: [(result, entry)]}, of training losses of fused and reference
    bf16_agreements: {preset: (result, entry)}, of training losses in fp32 and in bf16
    peers: {case name: (result, entry)}, of other libraries
    profile: the newest result of bench.suite.recurrence_profile, or None
    steps: {MKL mode: {case name: (result, row)}}, of bench.suite.step_profile
    """

    slug: str
    cases: dict = field(default_factory=lambda: {mode: {} for mode in mkl.MODES})
    bf16: dict = field(default_factory=dict)
    presets: dict = field(default_factory=lambda: {mode: {} for mode in mkl.MODES})
    bf16_presets: dict = field(default_factory=dict)
    agreements: dict = field(default_factory=dict)
    bf16_agreements: dict = field(default_factory=dict)
    peers: dict = field(default_factory=dict)
    profile: dict | None = None
    steps: dict = field(default_factory=lambda: {mode: {} for mode in mkl.MODES})

    @property
    def result(self):
        """A result that describes machine and versions: the newest one."""
        pairs = [
            p
            for group in (self.cases, self.presets)
            for mode in group.values()
            for p in mode.values()
        ]
        pairs = pairs or [*self.peers.values()]
        return max((result for result, _ in pairs), key=lambda result: result["date"])


def load(folder=RESULTS):
    """Returns [Measurements] of the CPU results: FRONT, then those with the most cases first."""
    found = {}
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    # A later result replaces an earlier one's measurement of the same case.
    for result in sorted(results, key=lambda result: result.get("date", "")):
        # The files of `make gpu` have a report of their own.
        if "machine" not in result or result["machine"]["gpu"]:
            continue
        slug = machine.slug(result, "cpu")
        add(found.setdefault(slug, Measurements(slug)), result)
    return sorted(found.values(), key=lambda m: (m.slug != FRONT, -len(m.cases["as-installed"])))


def add(measurements, result):
    if "peers" in result:
        for entry in result["rows"]:
            put_last(measurements.peers, entry["name"], (result, entry))
        return
    if "recurrence profile" in result:
        measurements.profile = result
        return
    mode = result.get("mkl", "as-installed")
    if "step profile" in result:
        for name, row in result["rows"].items():
            put_last(measurements.steps[mode], name, (result, row))
        return
    if isinstance(result["rows"], list):
        for entry in result["rows"]:
            if entry["dtype"] == "float32":
                put_last(measurements.cases[mode], entry["name"], (result, entry))
                if lifted := metrics.unthrottled(entry):
                    rates = {"gemm": result["gemm, MKL unthrottled"]}
                    put_last(
                        measurements.cases["unthrottled"], entry["name"], (result | rates, lifted)
                    )
            elif entry["dtype"] == "bfloat16" and mode == "as-installed":
                put_last(measurements.bf16, entry["name"], (result, entry))
        return
    for preset, entry in result["rows"].items():
        if "fused:bf16" in entry.get("ops", ()):
            put_last(measurements.bf16_agreements, preset, (result, entry))
        elif "losses" in entry:
            measurements.agreements.setdefault(preset, []).append((result, entry))
        elif "fused:bf16" in entry["step seconds"]:
            put_last(measurements.bf16_presets, preset, (result, entry))
        elif "fused / baselines" in entry["ratio"]:
            known = measurements.presets[mode].get(preset)
            # A run of all presets has the compiled baseline of each.
            if known is None or len(entry["ratio"]) >= len(known[1]["ratio"]):
                put_last(measurements.presets[mode], preset, (result, entry))


def put_last(found, name, pair):
    """Replaces an entry, so that the order is that of the newest result."""
    found.pop(name, None)
    found[name] = pair


def processor(facts):
    """Returns the processor's name for readers, from the machine's part of a result."""
    return PROCESSORS.get(facts["cpu"], facts["cpu"])


def speedup(entry):
    """Returns the gain over the faster of eager PyTorch and torch's operator, and its name."""
    present = [name for name in metrics.BASELINES if name in entry["median"]]
    name = min(present, key=entry["median"].get)
    return metrics.gain(entry, name), name


def step_speedup(entry):
    """Returns the gain of a training step over the faster of the PyTorch models that were measured.

    Of those, chunked-loss has torch's own F.linear_cross_entropy.
    """
    ratios = (entry["ratio"].get(f"fused / {name}") for name in ("baselines", "chunked-loss"))
    return min(ratio for ratio in ratios if ratio is not None)


def commits(pairs):
    """Returns the dates and commits at which entries were measured, in order and in words.

    pairs: (result, entry) of each entry
    """
    results = {result["date"]: result for result, _ in pairs}
    return ", ".join(
        dict.fromkeys(
            f"{date[:10]} at commit {commit(result)}" for date, result in sorted(results.items())
        )
    )


def commit(result):
    """Returns the commit of a result in Markdown, and whether its sources had been changed."""
    text = f"`{(result['commit'] or 'unknown')[:12]}`"
    return text + " with changes" * bool(result.get("dirty"))
