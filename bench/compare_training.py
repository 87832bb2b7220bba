"""Whole training steps of ptb, two operator sets side by side, from the same weights on the same batches.

    python -m bench.compare_training agree --data DIR     do fused and reference give the same training losses?
    python -m bench.compare_training speed --data DIR     tokens per second, fused against the PyTorch a good user writes

`speed` goes step by step through the sets in turn (whatever disturbs the machine disturbs both), reports medians and
writes bench/results/. Its baseline is bench/baselines.py, not the oracle.
"""

import argparse
import json
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
from fusedseq.tasks import ptb
from fusedseq.tasks.training import override
from fusedseq.tasks.training.optimization import Optimization

from bench import machine

OPERATORS = {"fused": "fusedseq.fused", "reference": "fusedseq.reference", "baselines": "bench.baselines"}
RESULTS = Path(__file__).parent / "results"


class Run:
    """A training run with random numbers of its own, taken a step at a time beside others."""

    def __init__(self, name, settings, corpus, seed, device):
        torch.manual_seed(seed)
        self.name = name
        self.task = ptb.Task(settings, corpus, ops=import_module(OPERATORS[name]), seed=seed, device=device)
        self.optimization = Optimization(self.task.model.parameters(), settings.training)
        self.batches = self._batches()
        self._rng = self._get_rng()

    def _batches(self):
        epoch = 0
        while True:
            yield from self.task.start_epoch(epoch)
            epoch += 1

    def _get_rng(self):
        cuda = self.task.device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.task.device) if cuda else None

    def step(self):
        """One training step: its loss (a tensor), tokens and seconds."""
        cpu, cuda = self._rng
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.task.device)
        batch = next(self.batches)
        self._wait()
        begun = time.perf_counter()
        result = self.task.loss(batch)
        self.optimization.zero_grad()
        result.objective.backward()
        self.optimization.step(result.lr_scale)
        self._wait()
        seconds = time.perf_counter() - begun
        self._rng = self._get_rng()
        return result.loss.detach(), result.items, seconds

    def _wait(self):
        if self.task.device.type == "cuda":
            torch.cuda.synchronize()


def agree(args, corpus, preset, settings):
    """The largest difference of the training losses in `args.steps` steps."""
    runs = [Run(name, settings, corpus, args.seed, args.device) for name in args.ops]
    other = Run(args.ops[-1], settings, corpus, args.seed, args.device) if args.yardstick else None
    if other:
        perturb(other.task.model)
    losses, worst, yardstick = [], (0.0, 0), 0.0
    for step in range(1, args.steps + 1):
        losses.append([run.step()[0].item() for run in runs])
        if other:
            yardstick = max(yardstick, abs(other.step()[0].item() - losses[-1][-1]))
        worst = max(worst, (max(losses[-1]) - min(losses[-1]), step))
        if step % 10 == 0 or step == args.steps:
            print(f"{preset}: step {step}, loss {losses[-1][0]:.6f}, largest difference {worst[0]:.3g} "
                  f"(step {worst[1]})", flush=True)  # fmt: skip
    if other:
        print(f"{preset}: {args.ops[-1]} against itself from weights one rounding away: {yardstick:.3g}", flush=True)
    return {
        "ops": args.ops,
        "steps": args.steps,
        "yardstick": yardstick if other else None,
        "largest difference": worst[0],
        "at step": worst[1],
        "losses": losses,
    }


def perturb(model):
    """Moves every weight to a neighbouring floating point number: what rounding alone does to a training run."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))


def speed(args, corpus, preset, settings):
    """Tokens per second of each operator set: medians over `args.steps` steps, after `args.warmup`."""
    runs = [Run(name, settings, corpus, args.seed, args.device) for name in args.ops]
    times = {name: [] for name in args.ops}
    for step in range(args.warmup + args.steps):
        for run in runs[:: 1 if step % 2 else -1]:
            _, items, seconds = run.step()
            if step >= args.warmup:
                times[run.name].append((items, seconds))
    first, *others = args.ops
    result = {"batch": settings.data.batch, "steps": args.steps, "warmup": args.warmup, "tokens per second": {
        name: statistics.median(items / seconds for items, seconds in pairs) for name, pairs in times.items()
    }, "ratio": {}, "step seconds": {name: [round(s, 5) for _, s in pairs] for name, pairs in times.items()}}  # fmt: skip
    for other in others:
        result["ratio"][f"{first} / {other}"] = statistics.median(
            theirs / ours for (_, ours), (_, theirs) in zip(times[first], times[other], strict=True)
        )
    rates = ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in result["tokens per second"].items())
    ratios = ", ".join(f"{pair} {ratio:.2f}x" for pair, ratio in result["ratio"].items())
    print(f"{preset}: {rates}; {ratios}", flush=True)
    return result


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m bench.compare_training", description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=("agree", "speed"))
    parser.add_argument("--data", help="the data's directory, or 'synthetic' (default: $FUSEDSEQ_DATA)")
    parser.add_argument("--preset", action="append", choices=ptb.PRESETS, help="default: mogrifier-awd and awd-merity")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments")
    parser.add_argument(
        "--ops", nargs="+", choices=OPERATORS, help="default: fused, and what the mode compares it with"
    )
    parser.add_argument("--steps", type=int, help="default: 200 to agree, 15 for speed")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--yardstick", action="store_true", help="agree: also run the last set from weights one rounding away"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="the JSON file (default: in bench/results)")
    args = parser.parse_args(argv)
    args.ops = args.ops or ["fused", "reference" if args.mode == "agree" else "baselines"]
    args.steps = args.steps or {"agree": 200, "speed": 15}[args.mode]
    facts, function = machine.facts(args.device), {"agree": agree, "speed": speed}[args.mode]
    try:
        corpus = ptb.corpus.load(args.data)
        rows = {}
        for preset in args.preset or ("mogrifier-awd", "awd-merity"):
            settings = override(ptb.PRESETS[preset], args.assignments)
            rows[f"ptb/{preset}"] = function(args, corpus, preset, settings)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    out = args.out or RESULTS / f"{machine.slug(facts, args.device)}-training-{args.mode}.json"
    name = args.data if args.data == "synthetic" else "ptb"
    out.write_text(json.dumps({**facts, "data": name, "settings": args.assignments, "rows": rows}, indent=1) + "\n")
    print(f"written: {out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
