"""The trials of an Optuna study, which many processes on many machines take from one storage."""

import platform
import shutil
import threading
import time
import uuid
import warnings
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState

from fusedseq.tasks.lock import locked, try_lock
from fusedseq.tasks.studies.storage import opened
from fusedseq.tasks.training.trainer import BEST

BEAT, PATIENCE = 30.0, 300.0  # seconds: who runs a trial says so, and is believed dead after a silence
RETRIES = 2  # of a trial that ended its process: a third time it would again
MACHINE = f"{platform.node()}-{uuid.getnode():x}"
FOLDER = "trials"

optuna.logging.set_verbosity(optuna.logging.ERROR)  # we say what there is to say

SAMPLERS = {
    "tpe": lambda seed: optuna.samplers.TPESampler(
        seed=seed, constant_liar=True
    ),  # which sees what others try just now
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
}
PRUNERS = {
    "median": lambda: optuna.pruners.MedianPruner(n_warmup_steps=1),
    "halving": optuna.pruners.SuccessiveHalvingPruner,
    "none": optuna.pruners.NopPruner,
}


class Trials:
    """A study's trials.

    storage: a URL    name: the study's    out: the directory of the trials' runs    space: {setting: its values}
    begun: JSON, what all processes of the study must say alike    seed: of the sampler
    Errors: ValueError where the study was begun otherwise
    """

    def __init__(self, storage, name, out, space, *, begun, seed=0, sampler="tpe", pruner="median"):
        self.name, self.out, self.seed, self.sampler = name, Path(out), seed, sampler
        self.space = {key: CategoricalDistribution(values) for key, values in space.items()}
        (self.out / FOLDER).mkdir(parents=True, exist_ok=True)
        with self._alone():
            self.study = optuna.create_study(
                storage=opened(storage), study_name=name, pruner=PRUNERS[pruner](), load_if_exists=True
            )
            was = self.study.user_attrs.get("begun")
            if was is None:
                self.study.set_user_attr("begun", begun)
            elif was != begun:
                key = next(key for key in {**was, **begun} if was.get(key) != begun.get(key))
                raise ValueError(f"study {name!r} was begun with {key} {was.get(key)}, got {begun.get(key)}: it keeps what "
                                 f"its trials share; give another --study")  # fmt: skip

    def _alone(self):
        """Within it no other process with this directory takes a trial."""
        return locked(self.out / ".lock")

    def all(self):
        return self.study.get_trials(deepcopy=False)

    def best(self):
        """None where none is complete."""
        complete = [t for t in self.all() if t.state == TrialState.COMPLETE]
        return min(complete, key=lambda t: (t.value, t.number), default=None)

    def running(self):
        return [t for t in self.all() if t.state == TrialState.RUNNING]

    def taken(self):
        """Those that count: not what waits, nor what was begun again as another."""
        again = {t.user_attrs.get("again") for t in self.all()}
        return [t for t in self.all() if t.state != TrialState.WAITING and t.number not in again]

    def folder(self, trial):
        return self.out / FOLDER / f"{self.name}-{trial.user_attrs.get('run', trial.number):04}"

    @contextmanager
    def take(self, total):
        """A trial to run, this process's until the end of the block; None where `total` are taken. Say `complete`,
        `prune` or `fail` of it; of what ends otherwise another process will take it up again."""
        with ExitStack() as stack:
            with self._alone():
                self._recover()
                trial = self._ask() if len(self.taken()) < total else None
                if trial is not None:
                    stack.enter_context(self._held(trial))
            if trial is None:
                yield None
                return
            try:
                yield trial
            except optuna.exceptions.UpdateFinishedTrialError:
                _lost(trial)
            except BaseException as error:
                self.give_back(trial, counts=not isinstance(error, KeyboardInterrupt))
                raise
            finally:
                stack.close()
                self.tidy()

    def _ask(self):
        """The seed is of the number, so that no two processes draw the same, and a study resumed goes on as it would."""
        seed = int(np.random.SeedSequence([self.seed, len(self.all())]).generate_state(1)[0])
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            self.study.sampler = SAMPLERS[self.sampler](seed)
        return self.study.ask(self.space)

    @contextmanager
    def _held(self, trial):
        folder = self.folder(trial)
        folder.mkdir(exist_ok=True)
        with try_lock(folder / ".lock"), _heartbeat(trial):
            trial.set_user_attr("place", [MACHINE, str(folder.resolve())])
            yield

    # How a trial ends.

    def complete(self, trial, value, figures):
        """figures: JSON, for the table"""
        self._end(trial, {"figures": figures}, values=value)

    def prune(self, trial):
        self._end(trial, {}, state=TrialState.PRUNED)

    def fail(self, trial, why):
        self._end(trial, {"why": why}, state=TrialState.FAIL)

    def _end(self, trial, attributes, **told):
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        self.study.tell(trial, **told)

    def give_back(self, trial, counts=True):
        """It is to be done again, from its last checkpoint where that is at hand; but for one that `counts` as a
        failure for the third time."""
        attributes = trial.user_attrs
        retries = attributes.get("retries", 0) + counts
        try:
            self.study.tell(trial.number, state=TrialState.FAIL)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):  # it has ended, and no more than that is wrong
            _lost(trial)
            return
        if retries <= RETRIES:
            again = {"again": trial.number, "run": attributes.get("run", trial.number), "retries": retries}
            self.study.enqueue_trial(trial.params, user_attrs=again)

    def _recover(self):
        """Takes the trials of dead processes from them."""
        for trial in self.running():
            if not _is_alive(trial):
                print(f"trial {trial.number}: its process is dead, it will be done again", flush=True)
                self.give_back(trial)

    def tidy(self):
        """Deletes the checkpoints of trials that have ended, but for the best's weights."""
        with self._alone():
            best, trials = self.best(), self.all()
            going = {self.folder(t) for t in trials if not t.state.is_finished()}
            for folder in {self.folder(t) for t in trials} - going:
                for file in folder.glob("*.safetensors"):
                    if file.name != BEST or best is None or folder != self.folder(best):
                        file.unlink()

    def begin_anew(self, trial):
        """Empties a trial's directory."""
        for path in self.folder(trial).iterdir():
            if path.name != ".lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_alive(trial):
    """Of a process on this machine its lock tells; of another its heartbeat."""
    machine, folder = trial.user_attrs.get("place", (None, ""))
    if machine == MACHINE and Path(folder).is_dir():
        with try_lock(Path(folder) / ".lock") as free:
            return not free
    beat = trial.user_attrs.get("beat", trial.datetime_start.timestamp())
    return time.time() - beat < PATIENCE


def _lost(trial):
    """What a process finds that was asleep for long."""
    print(
        f"trial {trial.number} was believed dead and given to another process: what came out here is dropped",
        flush=True,
    )


@contextmanager
def _heartbeat(trial):
    ended = threading.Event()

    def beat():
        while not ended.wait(BEAT):
            with suppress(Exception):  # a storage out of reach for a while is no reason to end
                trial.set_user_attr("beat", time.time())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
