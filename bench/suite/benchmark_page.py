"""The text of docs/benchmarks.md: the gains of a few cases on every machine, and the method."""

from bench.suite import front_cases, measurements, report
from bench.suite.machine_page import COMMENT, file_name, name

HEAD = """# Benchmarks

![Speed-ups over PyTorch](assets/speedup-light.svg#only-light)
![Speed-ups over PyTorch](assets/speedup-dark.svg#only-dark)

The numbers in the tables are from result files in `bench/results`, which have the commit, the
versions and the time of every round. `make bench` measures the operators again on your machine, in
about 11 minutes on 2 cores. [GPU status](gpu-status.md) has what was measured on a GPU.
"""
GAINS = """## Gains at a glance

Over the faster of PyTorch's own operator and eager PyTorch. On AMD processors the first number is
with MKL unthrottled, and the one in brackets with MKL as installed, which runs its AVX2 code there.
A page for each machine has all cases, with times, memory, limits and the targets that are missed.
"""
METHOD = """## How it is measured

- **Correct first.** Before a case is timed, `fused` is compared with the oracle (the pure-PyTorch
  definition in `fusedseq.reference`) on the inputs that are timed. A case with a wrong result fails
  and has no time.
- **Interleaved.** In every round each provider runs once, in an order that rotates. A time is the
  median of its rounds, a gain the ratio of two such medians, so that whatever disturbs the machine
  disturbs all providers. There are 5 to 101 rounds, by the time of a call. The batches of a
  training may have different lengths, so that there a gain is the median of the ratios of the
  rounds, whose steps have the same batch.
- **eager** is the PyTorch that an experienced user writes, with torch's own dropouts. **torch** is
  torch's own fused operator where there is one: `torch.nn.LSTM`'s,
  `F.scaled_dot_product_attention`, `F.linear_cross_entropy` with the fastest of its chunk sizes,
  `torch.optim.ASGD` in its foreach form; for the embedding, a gather whose rows are masked
  afterwards. **compiled** is torch.compile of eager; of a recurrence only the step
  is compiled, because torch.compile unrolls a loop over steps, which takes minutes. Only the Zen 5
  has results of it, for some cases: with MKL as installed, the embedding's forward is 0.99 and 2.04
  times as fast as compiled, and `activation_regularization` 1.39 times.
- **Memory.** Fused operators reuse freed memory (`FUSEDSEQ_CACHE_MB`), where torch's allocator
  returns large blocks to the system and gets them back as pages to be filled with zeros. That is
  part of the gain of operators that move memory, as the dropouts do.
- **forward+backward** is one call and the gradients of all its float inputs.
- **Roofline limits** are measured in the same run: for cases limited by arithmetic, the best
  product of two 2048 × 2048 matrices, by `torch.mm` (which targets mean) and by the product inside
  our recurrences ("own GEMM"); for cases limited by memory, torch's copy of a tensor of the case's
  size; for a recurrence with batch 1, which reads all weights in each step, `torch.mv`. The fused
  operator can exceed 100 % of `torch.mm` where its own product is faster.
- **Peak memory** is that of one call: results, saved tensors, gradients and workspace, without the
  inputs. What a recurrence saves for backward is its gates and states.
- A case with a star was disturbed: other processes used more than 0.1 core while it was measured.
- A case with ‡ was measured, with MKL as installed or unthrottled, on cores between which a cache
  line took more than 100 ns most of the time, where cores with a common cache take some 35. They
  shared no cache, or, on Emerald Rapids, where a line takes some 80 ns, were slow by chance. The
  host of a virtual machine may place its processors in either way, and change it at any time. A
  call whose threads exchange much, as those of a recurrence do, is slower then. Cases measured
  before 28 November 2026, 10:00, do not say which of the two it was.
"""


def markdown(machines):
    """Returns docs/benchmarks.md."""
    no_intel = not any(m.result["machine"]["cpu"].startswith("Intel") for m in machines)
    remark = ["Nothing has been measured on an Intel processor yet."] if no_intel else []
    labels = {
        **{case: label for case, (label, _) in front_cases.OPERATORS.items()},
        **front_cases.TRAINING,
        **front_cases.BF16,
    }
    links = [f"[{name(machine)}](benchmarks/{file_name(machine)})" for machine in machines]
    parts = [COMMENT, HEAD, *remark, GAINS, gains_table(machines, labels, links), METHOD]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def gains_table(machines, labels, heads):
    """Returns a table with a line for each case and a column for each machine.

    labels: {benchmark case or TASK/PRESET: what readers call it}    heads: of the machines' columns
    """
    lines = [["", *heads]]
    lines += [[label, *(gain(m, case) for m in machines)] for case, label in labels.items()]
    return report.markdown_table(lines)


def gain(machine, case):
    """Returns a cell: the gain with MKL unthrottled and, in brackets, as installed."""
    if case in machine.bf16:
        return f"{measurements.speedup(machine.bf16[case][1])[0]:.2f}×"
    of = ratio_of_step if case in front_cases.TRAINING else ratio_of_operator
    unthrottled, installed = (of(machine, case, mode) for mode in ("unthrottled", "as-installed"))
    if unthrottled is None:
        return "" if installed is None else f"{installed:.2f}×"
    return f"{unthrottled:.2f}×" + ("" if installed is None else f" ({installed:.2f}×)")


def ratio_of_operator(machine, case, mode):
    pair = machine.cases[mode].get(case)
    return pair and measurements.speedup(pair[1])[0]


def ratio_of_step(machine, preset, mode):
    pair = machine.presets[mode].get(preset)
    return pair and measurements.step_speedup(pair[1])
