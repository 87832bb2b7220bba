"""make gpu-train RUN=TASK/NAME: trains an experiment on this machine's GPU for a limited time.

    make gpu-train RUN=ptb/awd DATA=DATA OUT=DIR            starts, or resumes what runs/gpu has
    make gpu-train RUN=ptb/awd PART=2 MINUTES=0 OUT=DIR     only brings the checkpoint's second part
    make gpu-train RUN=ptb/awd FROM=DIR ...                 resumes an earlier machine's run

RUN may also be reverse/tune or en-fr/grid, whose trials and configurations are trained one after
the other. The command builds, times some steps beside plain PyTorch (once), trains until MINUTES
are over, and leaves in OUT at most 8 files, each under 16 MiB, together under 64 MiB: NAME.json
(the position of the run, and the commands that resume it), NAME-epochs.csv, NAME-result.json or the
like, NAME-log.txt, and the checkpoint in pieces NAME.000 and so on. Further commands, with PART=2,
3, ..., bring the pieces that did not fit; on a machine that is still running none of this is
necessary. A resumed run is bit for bit the run without interruption.

FROM may be given in several commands, each with some of the pieces; they are unpacked when all have
arrived and are intact. Exit code 0: the run is finished; 3: it is not, and NAME.json has the
command that resumes it; 1: something failed. FUSEDSEQ_FAKE_GPU=1 rehearses it on the CPU.
ARGS='--set ...' are passed to the program that trains.
"""

import argparse
import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.gpu.checkpoint_pieces import pack, unpack
from tools.gpu.device import architecture, unavailable
from tools.gpu.processes import ROOT, shorten

PIECES = 4  # pieces per command, which leaves 4 files and 8 MiB for the reports
REPORTS = (
    "result.json",
    "best-*/result.json",
    "epochs.csv",
    "trials.csv",
    "table.csv",
    "speed.json",
    "table.md",
)
BUILD_SECONDS, TIMING_SECONDS = 180, 60  # at most
PACKING_SECONDS = 40  # reserved at the end
UNFINISHED = 3  # exit code


class Training:
    """One `make gpu-train`: its directory, its child processes and what it leaves in OUT."""

    def __init__(self, args, fake):
        from fusedseq.tasks.experiments.documented import EXPERIMENTS

        if args.run not in EXPERIMENTS:
            raise ValueError(f"RUN must be one of {', '.join(EXPERIMENTS)}, got {args.run}")
        self.args, self.experiment, self.fake = args, EXPERIMENTS[args.run], fake
        self.name = args.run.replace("/", "-")
        self.folder = (args.work or ROOT / "runs/gpu") / self.name
        self.start, self.log = time.monotonic(), self.folder.with_name(f"{self.name}.log")
        self.packing_seconds = 4 if fake else PACKING_SECONDS
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'pyext'}{os.pathsep}{ROOT}",
            "PYTHONUNBUFFERED": "1",
        }

    def seconds_left(self):
        return 60 * self.args.minutes - (time.monotonic() - self.start)

    def say(self, text):
        print(f"== {text} (at {time.monotonic() - self.start:.0f} s)", flush=True)

    def execute(self, seconds, *command, **environment):
        """Runs a command for at most `seconds`; returns its exit code, or None if it had to be
        killed.

        SIGTERM makes training stop at the next step and write a checkpoint. After SIGKILL it
        resumes from the checkpoint before.
        """
        with self.log.open("ab") as log:
            log.write(f"\n== {' '.join(map(str, command))}\n".encode())
            log.flush()
            child = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
                env={**self.environment, **environment},
            )
            try:
                return child.wait(max(1.0, seconds))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(PACKING_SECONDS / 2)
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    def import_run(self):
        """Unpacks what an earlier machine left; returns False while pieces are missing."""
        if not self.args.source or self.folder.exists():
            return True
        arriving = self.folder.with_name(f"{self.name}.arriving")
        missing = unpack(self.args.source, arriving, self.folder, self.name)
        if missing:
            self.say(f"pieces that are still missing: {', '.join(missing)}")
        return not missing

    def build(self):
        if self.fake:
            return True
        environment = {"FUSEDSEQ_CUDA": "1", "TORCH_CUDA_ARCH_LIST": architecture(self.environment)}
        command = sys.executable, "setup.py", "-q", "build_ext", "--inplace"
        return self.execute(BUILD_SECONDS, *command, **environment) == 0

    def data_options(self):
        return ["--data", self.args.data] if self.args.data else []

    def command(self):
        """Returns the command that trains: it resumes what the folder has."""
        experiment = self.experiment
        verb = (experiment.run or f"train {experiment.task} --preset {experiment.preset}").split()
        resume = {"tune": ["--then-train"], "grid": []}.get(verb[0], ["--resume"])
        where = ["--device", "cpu" if self.fake else "cuda", "--out", self.folder]
        options = [*resume, *where, *self.data_options(), *self.args.rest]
        return [sys.executable, "-m", "fusedseq", *verb, *options]

    def time_steps(self):
        """Times some steps beside those of the same model in plain PyTorch; of a study its usual
        preset.
        """
        presets = {"reverse/tune": "reverse/tuned", "en-fr/grid": "en-fr/base"}
        preset = presets.get(self.args.run, self.args.run)
        speed = self.folder / "speed.json"
        enough_time = self.seconds_left() > TIMING_SECONDS + self.packing_seconds
        if speed.exists() or not enough_time or self.args.rest:
            return
        command = [sys.executable, "-m", "bench.training.compare", "speed", preset]
        options = ["--ops", "fused", "baselines", "--device", "cuda", "--out", speed]
        self.execute(TIMING_SECONDS, *command, *options, *self.data_options())

    def train(self):
        """Returns done, more or failed."""
        if self.is_finished():
            return "done"
        if self.seconds_left() < self.packing_seconds + 1:
            return "more"
        code = self.execute(self.seconds_left() - self.packing_seconds, *self.command())
        if code == 0:
            return "done"
        return "more" if code in (130, None) else "failed"

    def is_finished(self):
        return self.experiment.run is None and (self.folder / "result.json").exists()

    def publish(self, outcome):
        """Writes the state of the run, its reports and one part of its checkpoint into OUT."""
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        shards = self.folder.with_name(f"{self.name}.shards")
        pieces = {} if outcome == "done" else pack(self.folder, shards, self.name)
        parts = [[*pieces][i : i + PIECES] for i in range(0, len(pieces), PIECES)] or [[]]
        part = min(max(self.args.part, 1), len(parts))
        for piece in parts[part - 1]:
            shutil.copyfile(shards / piece, out / piece)
        for path in self.reports():
            (out / f"{self.name}-{path.name}").write_text(shorten(path.read_text(), 2 << 20))
        log = shorten(self.log.read_text(errors="replace"), 1 << 20)
        (out / f"{self.name}-log.txt").write_text(log)
        state = self.state(outcome, pieces, part, len(parts))
        (out / f"{self.name}.json").write_text(json.dumps(state, indent=1) + "\n")
        position = json.dumps(self.position())
        self.say(f"{self.args.run}: {outcome}, {position}; part {part} of {len(parts)} is in {out}")

    def state(self, outcome, pieces, part, parts):
        """Returns the content of NAME.json."""
        again = f"make gpu-train RUN={self.args.run}"
        return {
            "row": self.args.run,
            "what": outcome,
            **self.position(),
            "command": " ".join(map(str, self.command()[1:])),
            "seconds of this command": round(time.monotonic() - self.start, 1),
            "pieces": pieces,
            "part": part,
            "parts": parts,
            "on this machine": f"{again}, with the same DATA and ARGS",
            "on another": f"the same and FROM=DIR, with all {len(pieces)} pieces",
            "other parts": [
                f"{again} PART={k} MINUTES=0" for k in range(1, parts + 1) if k != part
            ],
        }

    def reports(self):
        """Returns the two files for readers that go into OUT beside pieces, log and NAME.json."""
        return [path for name in REPORTS for path in sorted(self.folder.glob(name))[-1:]][:2]

    def position(self):
        """Returns the last line of epochs.csv as numbers; of a study the finished
        configurations.
        """
        path = self.folder / "epochs.csv"
        if not path.exists():
            if not self.experiment.run:
                return {}
            return {"finished configurations": len(list(self.folder.glob("*/result.json")))}
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        return {key: float(value) for key, value in lines[-1].items() if value} if lines else {}

    def run(self):
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        outcome = "more"
        try:
            if not self.import_run():
                return UNFINISHED
            self.folder.mkdir(exist_ok=True)
            if self.args.minutes > 0:
                if not self.build():
                    outcome = "failed"
                    return 1
                if not self.fake:
                    self.time_steps()
                outcome = self.train()
            elif self.is_finished():
                outcome = "done"
            return {"done": 0, "more": UNFINISHED, "failed": 1}[outcome]
        finally:
            if self.folder.exists():
                self.publish(outcome)


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu.train", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--run", required=True, metavar="TASK/NAME")
    parser.add_argument("--data", metavar="DIR", help="the data's directory, or 'synthetic'")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu/out", metavar="DIR")
    parser.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="DIR",
        help="directory with NAME.json and pieces of an earlier machine's run",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="duration of the whole command (default: %(default)s)",
    )
    parser.add_argument(
        "--part",
        type=int,
        default=1,
        help="which part of the checkpoint to write into OUT (default: %(default)s)",
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="directory of the runs (default: runs/gpu)"
    )
    args, args.rest = parser.parse_known_args()
    fake = os.environ.get("FUSEDSEQ_FAKE_GPU")
    sys.path.insert(0, str(ROOT / "pyext"))
    try:
        if reason := unavailable(fake):
            raise ValueError(reason)
        return Training(args, fake).run()
    except (ValueError, OSError) as error:
        print(f"make gpu-train: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
