"""How much of a recurrence's time its matrix products take, on the CPU.

python -m bench.suite.recurrence_profile [--seconds S] [--perf] [--out DIR | --record]

For some recurrences, in interleaved rounds: the forward pass; forward and backward; and the forward
pass's products alone, of the same sizes and as often, by the same code on the same threads. What a
forward pass takes beyond its products is its pointwise work, its barriers and its memory traffic.
The backward pass has twice as many operations in its products as the forward pass. With --perf
also what the rest of the time is spent in, by samples.
"""

import argparse
import json
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from fusedseq import fused, testing

from bench.suite import machine, measurements, recurrence_shares, report, roofline

ROOT = Path(__file__).parents[2]
TITLE = """## Recurrences: time beside the products

The products alone have the sizes, the number and the code of those in the forward pass. What a
forward pass takes beyond them is pointwise work, barriers and memory traffic. The last column
counts the products of the backward pass as twice those of the forward pass, as their operations
are; it would be 100 % if nothing else took time, and is more where the backward's products, which
have more rows, are faster. `python -m bench.suite.recurrence_profile` measures this.
"""
HEAD = [
    "recurrence",
    "forward ms",
    "products ms",
    "GFLOP/s of the products",
    "products of forward",
    "forward+backward ms",
    "products of both",
]


@dataclass(frozen=True)
class Recurrence:
    """T steps with batch B, input width X, hidden width H and rounds of the Mogrifier."""

    T: int
    B: int
    X: int
    H: int
    rounds: int = 0

    @property
    def op(self):
        return "mogrifier_lstm" if self.rounds else "lstm"

    @property
    def name(self):
        return f"{self.op}-T{self.T}-B{self.B}-{self.X}-{self.H}" + f"-r{self.rounds}" * (
            self.rounds > 0
        )

    def inputs(self, dtype=torch.float32):
        if self.rounds:
            case = testing.mogrifier_lstm_case(self.T, self.B, self.X, self.H, self.rounds)
        else:
            case = testing.lstm_case(self.T, self.B, self.X, self.H)
        return case.inputs("cpu", dtype)

    def products(self):
        """Yields (rows, K, N, repeats) of the forward pass's products."""
        T, B, X, H = self.T, self.B, self.X, self.H
        yield B, H, 4 * H, T
        if self.rounds:
            yield B, X, 4 * H, T
            yield B, H, X, T * ((self.rounds + 1) // 2)
            yield B, X, H, T * (self.rounds // 2)
        else:
            yield T * B, X, 4 * H, 1

    def flops(self):
        return sum(2 * M * K * N * repeats for M, K, N, repeats in self.products())


RECURRENCES = (
    Recurrence(70, 70, 650, 650, 5),
    Recurrence(35, 20, 650, 650, 5),
    Recurrence(70, 20, 650, 650),
    Recurrence(50, 64, 1024, 1024),
    Recurrence(35, 64, 256, 256),
    Recurrence(200, 32, 128, 128),
    Recurrence(50, 16, 300, 300),
    Recurrence(100, 8, 128, 256),
)


def calls(recurrence, dtype=torch.float32):
    """Returns {name: a call without arguments}; the products alone are always in fp32."""
    args, kwargs = recurrence.inputs(dtype)
    function = getattr(fused, recurrence.op)
    operands = [
        (torch.randn(M, K), torch.randn(N, K), repeats)
        for M, K, N, repeats in recurrence.products()
        if repeats
    ]

    def products():
        for x, W, repeats in operands:
            torch.ops.fusedseq.gemm_rate(x, W, repeats)

    return {
        "forward": roofline.bind(function, args, kwargs, backward=False),
        "products": products,
        "forward+backward": roofline.bind(function, args, kwargs, backward=True),
    }


def measure(recurrence, seconds):
    """Returns the row of a recurrence: the median seconds of each call."""
    timed = calls(recurrence)
    for call in timed.values():
        call()
    neighbours, order = machine.Neighbours(), deque(timed)
    times = {name: [] for name in timed}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["forward"]) < 5:
        for name in order:
            times[name].append(roofline.seconds(timed[name], "cpu"))
        order.rotate()
    return {
        "name": recurrence.name,
        "flops": recurrence.flops(),
        "median": {name: median(found) for name, found in times.items()},
        "rounds": len(times["forward"]),
        "others busy": neighbours.busy(),
    }


def table(rows):
    """Returns the table of a result's rows in Markdown."""
    lines = []
    for row in rows:
        t = row["median"]
        lines.append(
            [
                f"`{row['name']}`",
                report.three_digits(t["forward"] * 1e3),
                report.three_digits(t["products"] * 1e3),
                f"{row['flops'] / t['products'] / 1e9:.0f}",
                f"{t['products'] / t['forward']:.0%}",
                report.three_digits(t["forward+backward"] * 1e3),
                f"{3 * t['products'] / t['forward+backward']:.0%}",
            ]
        )
    return report.markdown_table([HEAD, *lines])


def section(result):
    """Returns the parts of a machine's page about a result."""
    commit = measurements.commit(result)
    facts = f"Kernels for {result['machine']['isa']}, commit {commit}, {result['date'][:10]}."
    parts = [TITLE, table(result["rows"])]
    if found := recurrence_shares.lines(result["rows"]):
        head = ["recurrence", "dtype", *recurrence_shares.GROUPS]
        parts += [recurrence_shares.TITLE, report.markdown_table([head, *found])]
    return [*parts, facts]


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m bench.suite.recurrence_profile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="for each recurrence")
    parser.add_argument("--perf", action="store_true", help="sample with Linux's perf too")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--record", action="store_true", help="write into bench/results")
    args = parser.parse_args(argv)
    facts = machine.facts("cpu")
    rows = [measure(recurrence, args.seconds) for recurrence in RECURRENCES]
    for row, recurrence in zip(rows, RECURRENCES, strict=True):
        if args.perf:
            row["shares"] = recurrence_shares.in_dtypes(recurrence, calls, args.seconds)
    result = {**facts, "recurrence profile": True, "rows": rows}
    folder = measurements.RESULTS if args.record else args.out
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{machine.slug(result, 'cpu')}-recurrence-profile.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows), f"\nwritten: {path}", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
