"""make gpu-train RUN=TASK/ROW: a row's training on the GPU of this machine, as far as one command's minutes go.

    make gpu-train RUN=ptb/mogrifier-awd-150 DATA=.data OUT=DIR          begins, or goes on with what runs/gpu holds
    make gpu-train RUN=ptb/mogrifier-awd-150 PART=2 MINUTES=0 OUT=DIR    trains nothing, and brings the checkpoint's second part
    make gpu-train RUN=ptb/mogrifier-awd-150 FROM=.carried ...           goes on with what an earlier machine left

Also reverse/tune and en-fr/grid, whose trials and configurations are trained one after the other. It builds, times some steps
beside plain PyTorch (once), trains until the minutes are over, and leaves in OUT at most 8 files, each under 16 MiB, together
under 64: NAME.json (where the run stands, and the commands that go on), NAME-epochs.csv, NAME-result.json or the like, NAME-log.txt, and
the checkpoint in pieces, NAME.000 and so on. Those that found no room come with a later command, PART=2, 3, ...; on a machine that
is still warm nothing of that is needed. A run that goes on is bit for bit the one that was not interrupted.

FROM may be given several times, each with some of the pieces; once all have come and are whole, they are unpacked. Exit code
0: the run is finished; 3: there is more to do, by the command that NAME.json has; 1: something failed.
FUSEDSEQ_FAKE_GPU=1 rehearses it on the CPU; ARGS='--set ...' go to the program that trains.
"""

import argparse
import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import gpu

ROOT = gpu.ROOT
PIECE, PIECES = 14 << 20, 4  # bytes of one, and how many one command brings: 4 files and 8 MiB are left for reports
REPORTS = ("result.json", "best-*/result.json", "epochs.csv", "trials.csv", "table.csv", "speed.json", "table.md")
BUILD, TIMED, AFTERWARDS = 180, 60, 40  # seconds: at most for the first two; kept for packing
MORE = 3


class Pieces(io.RawIOBase):
    """A file that is written in pieces: FOLDER/NAME.000, NAME.001, ..., each of `size` bytes but the last."""

    def __init__(self, folder, name, size):
        self.folder, self.name, self.size, self.count, self.data = folder, name, size, 0, bytearray()

    def writable(self):
        return True

    def write(self, data):
        self.data += data
        while len(self.data) >= self.size:
            self._end_piece()
        return len(data)

    def _end_piece(self):
        (self.folder / f"{self.name}.{self.count:03}").write_bytes(self.data[: self.size])
        del self.data[: self.size]
        self.count += 1

    def close(self):
        if self.data:
            self._end_piece()
        super().close()


def needed(folder):
    """The files of a run, or of a study, that going on takes: not the weights of what is finished."""
    for path in sorted(folder.rglob("*")):
        ended = (path.parent / "result.json").exists() or not (path.parent / "last.safetensors").exists()
        if (
            path.is_file()
            and path.name != ".lock"
            and path.suffix != ".tmp"
            and not (path.suffix == ".safetensors" and ended)
        ):
            yield path


def pack(folder, shards, name, size=PIECE):
    """The run in pieces in the directory `shards`, made anew: the same files give the same bytes. Returns {piece: its SHA-256}."""
    shutil.rmtree(shards, ignore_errors=True)
    shards.mkdir(parents=True)

    def plain(info):
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with (Pieces(shards, name, size) as raw, gzip.GzipFile("", "wb", 1, raw, mtime=0) as zipped,
          tarfile.open(fileobj=zipped, mode="w|", format=tarfile.PAX_FORMAT) as tar):  # fmt: skip
        for path in needed(folder):
            tar.add(path, str(path.relative_to(folder)), filter=plain)
    return {path.name: digest(path) for path in sorted(shards.iterdir())}


def digest(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Joined(io.RawIOBase):
    """Files, one after the other, as one to read."""

    def __init__(self, paths):
        self.paths, self.data = list(paths), b""

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.data and self.paths:
            self.data = memoryview(self.paths.pop(0).read_bytes())
        count = min(len(buffer), len(self.data))
        buffer[:count], self.data = self.data[:count], self.data[count:]
        return count


def unpack(came, arriving, folder, name):
    """Takes in what `came`, and unpacks it into `folder` once it is complete.

    came: a directory with NAME.json and some pieces    arriving: where pieces wait for the others
    returns the names of those that are missing
    Errors: ValueError where a piece is not what was packed
    """
    wanted = json.loads((came / f"{name}.json").read_text())["pieces"]
    if not wanted:
        raise ValueError(f"{came / name}.json is of a run that is finished: there is nothing to go on with")
    arriving.mkdir(parents=True, exist_ok=True)
    for piece, checksum in wanted.items():
        if (came / piece).exists() and (came / piece).resolve() != (arriving / piece).resolve():
            shutil.copyfile(came / piece, arriving / piece)
        if (arriving / piece).exists() and digest(arriving / piece) != checksum:
            (arriving / piece).unlink()
            if (came / piece).exists():
                raise ValueError(f"{came / piece} is not the piece that {name}.json speaks of: carry it again")
    missing = [piece for piece in wanted if not (arriving / piece).exists()]
    if not missing:
        half = folder.with_name(folder.name + ".half")
        shutil.rmtree(half, ignore_errors=True)
        with (io.BufferedReader(Joined(arriving / piece for piece in wanted)) as joined, gzip.GzipFile(fileobj=joined) as zipped,
              tarfile.open(fileobj=zipped, mode="r|") as tar):  # fmt: skip
            tar.extractall(half, filter="data")
        half.rename(folder)
        shutil.rmtree(arriving)
    return missing


class Training:
    def __init__(self, args, fake):
        from fusedseq.tasks.rows import ROWS

        if args.run not in ROWS:
            raise ValueError(f"RUN must be one of {', '.join(ROWS)}, got {args.run}")
        self.args, self.row, self.fake = args, ROWS[args.run], fake
        self.name = args.run.replace("/", "-")
        self.folder = (args.work or ROOT / "runs/gpu") / self.name
        self.start, self.log = time.monotonic(), self.folder.with_name(f"{self.name}.log")
        self.afterwards = 4 if fake else AFTERWARDS
        self.environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'pyext'}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}

    def left(self):
        return 60 * self.args.minutes - (time.monotonic() - self.start)

    def say(self, text):
        print(f"== {text} (at {time.monotonic() - self.start:.0f} s)", flush=True)

    def execute(self, seconds, *command, **environment):
        with self.log.open("ab") as log:
            log.write(f"\n== {' '.join(map(str, command))}\n".encode())
            log.flush()
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                                     env={**self.environment, **environment})  # fmt: skip
            try:
                return child.wait(max(1.0, seconds))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGTERM)  # it ends at the next step, with a checkpoint
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(AFTERWARDS / 2)  # also of a rehearsal
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # then it goes on from the checkpoint before
                child.wait()

    def take_in(self):
        """What an earlier machine left; whether there is nothing to wait for."""
        if not self.args.come_from or self.folder.exists():
            return True
        missing = unpack(self.args.come_from, self.folder.with_name(f"{self.name}.arriving"), self.folder, self.name)
        if missing:
            self.say(f"still to be carried: {', '.join(missing)}")
        return not missing

    def build(self):
        if self.fake:
            return True
        environment = {"FUSEDSEQ_CUDA": "1", "TORCH_CUDA_ARCH_LIST": gpu.architecture(self.environment)}
        return self.execute(BUILD, sys.executable, "setup.py", "-q", "build_ext", "--inplace", **environment) == 0

    def command(self):
        """That which trains: it goes on with what there is in the folder, and ends by SIGTERM with a checkpoint."""
        verb = (self.row.run or f"train {self.row.task} --preset {self.row.preset}").split()
        goes_on = ["--then-train"] if verb[0] == "tune" else [] if verb[0] == "grid" else ["--resume"]
        where = ["--device", "cpu" if self.fake else "cuda", "--out", self.folder]
        data = ["--data", self.args.data] if self.args.data else []
        return [sys.executable, "-m", "fusedseq", *verb, *goes_on, *where, *data, *self.args.rest]

    def time_steps(self):
        """Some steps beside those of the same model in plain PyTorch; for a study those of its usual row."""
        row = {"reverse/tune": "reverse/tuned", "en-fr/grid": "en-fr/base"}.get(self.args.run, self.args.run)
        speed = self.folder / "speed.json"
        if not speed.exists() and self.left() > TIMED + self.afterwards and not self.args.rest:
            self.execute(TIMED, sys.executable, "-m", "bench.compare_training", "speed", row, "--ops", "fused", "baselines",
                         "--device", "cuda", "--out", speed, *(["--data", self.args.data] if self.args.data else []))  # fmt: skip

    def train(self):
        """done, more or failed"""
        if self.finished():
            return "done"
        if self.left() < self.afterwards + 1:
            return "more"
        code = self.execute(self.left() - self.afterwards, *self.command())
        return "done" if code == 0 else "more" if code in (130, None) else "failed"

    def finished(self):
        return self.row.run is None and (self.folder / "result.json").exists()

    def publish(self, what):
        """Where the run stands, in OUT."""
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        shards = self.folder.with_name(f"{self.name}.shards")
        pieces = {} if what == "done" else pack(self.folder, shards, self.name)
        groups = [[*pieces][i : i + PIECES] for i in range(0, len(pieces), PIECES)] or [[]]
        part = min(max(self.args.part, 1), len(groups))
        for piece in groups[part - 1]:
            shutil.copyfile(shards / piece, out / piece)
        for path in self.reports():
            (out / f"{self.name}-{path.name}").write_text(gpu.shortened(path.read_text(), 2 << 20))
        (out / f"{self.name}-log.txt").write_text(gpu.shortened(self.log.read_text(errors="replace"), 1 << 20))
        again = f"make gpu-train RUN={self.args.run}"
        state = {
            "row": self.args.run, "what": what, **self.position(), "command": " ".join(map(str, self.command()[1:])),
            "seconds of this command": round(time.monotonic() - self.start, 1), "pieces": pieces,
            "part": part, "parts": len(groups),
            "on this machine": f"{again}, with the same DATA and ARGS", "on another": f"the same and FROM=DIR, with all {len(pieces)} pieces",
            "other parts": [f"{again} PART={k + 1} MINUTES=0" for k in range(len(groups)) if k != part - 1],
        }  # fmt: skip
        (out / f"{self.name}.json").write_text(json.dumps(state, indent=1) + "\n")
        self.say(f"{self.args.run}: {what}, {json.dumps(self.position())}; part {part} of {len(groups)} is in {out}")

    def reports(self):
        """What people read of a run or a study: two files, beside the pieces, the log and NAME.json."""
        return [path for name in REPORTS for path in sorted(self.folder.glob(name))[-1:]][:2]

    def position(self):
        """The last line of the curve, as numbers where they are."""
        path = self.folder / "epochs.csv"
        if not path.exists():
            return {"finished configurations": len(list(self.folder.glob("*/result.json")))} if self.row.run else {}
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return {key: float(value) for key, value in rows[-1].items() if value} if rows else {}

    def run(self):
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        what = "more"
        try:
            if not self.take_in():
                return MORE
            self.folder.mkdir(exist_ok=True)
            if self.args.minutes > 0:
                if not self.build():
                    what = "failed"
                    return 1
                if not self.fake:
                    self.time_steps()
                what = self.train()
            elif self.finished():
                what = "done"
            return {"done": 0, "more": MORE, "failed": 1}[what]
        finally:
            if self.folder.exists():
                self.publish(what)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--run", required=True, metavar="TASK/ROW")
    parser.add_argument("--data", metavar="DIR", help="the data's directory, or 'synthetic'")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu/out", metavar="DIR")
    parser.add_argument(
        "--from", type=Path, dest="come_from", metavar="DIR", help="NAME.json and pieces of an earlier machine's run"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="of this command in all (default: %(default)s)")
    parser.add_argument(
        "--part", type=int, default=1, help="which of the checkpoint's parts to bring (default: %(default)s)"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="where runs are kept (default: runs/gpu)")
    args, args.rest = parser.parse_known_args()
    fake = os.environ.get("FUSEDSEQ_FAKE_GPU")
    try:
        if why := gpu.missing(fake):
            raise ValueError(why)
        return Training(args, fake).run()
    except (ValueError, OSError) as error:
        print(f"make gpu-train: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
