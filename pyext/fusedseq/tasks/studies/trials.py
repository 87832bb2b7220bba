"""The trials of an Optuna study, which processes on many machines take from one storage.

The attributes that are stored with a trial are
    place: [machine, directory] of its process    beat: the time of its last sign of life
    figures: its metrics    why: a failure's reason
    again: the number of the trial that it repeats    run: the number of the first one
    retries: how often it was repeated because its process ended
"""

import platform
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, Trial, TrialState

from fusedseq.tasks.studies.storage import opened
from fusedseq.tasks.training.files import refuse_link
from fusedseq.tasks.training.former_names import current_key
from fusedseq.tasks.training.lock import LOCK, locked, new_directory, try_lock
from fusedseq.tasks.training.trainer import BEST

# Seconds. A process reports every BEAT that it is running its trial, and counts as dead after
# PATIENCE without a report.
BEAT, PATIENCE = 30.0, 300.0
# How often a trial is repeated whose process ended: a trial may itself be what ends its process.
RETRIES = 2
MACHINE = f"{platform.node()}-{uuid.getnode():x}"
FOLDER = "trials"

optuna.logging.set_verbosity(optuna.logging.ERROR)  # the commands print what matters themselves

SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    # constant_liar: the sampler takes into account what other processes are trying.
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, constant_liar=True),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
}
PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "median": lambda: optuna.pruners.MedianPruner(n_warmup_steps=1),
    "halving": optuna.pruners.SuccessiveHalvingPruner,
    "none": optuna.pruners.NopPruner,
}


class Trials:
    """The trials of a study.

    storage: a URL, see `storage.opened`    name: the study's    out: for the trials' directories
    space: {setting: its values}    seed: of the sampler
    begun: JSON that must be equal in all processes of the study
    Errors: ValueError where `begun` differs from that of the process that created the study
    """

    def __init__(
        self,
        storage: str,
        name: str,
        out: str | Path,
        space: dict[str, Any],
        *,
        begun: dict[str, Any],
        seed: int = 0,
        sampler: str = "tpe",
        pruner: str = "median",
    ) -> None:
        self.name, self.out, self.seed, self.sampler = name, Path(out), seed, sampler
        self.space = {key: CategoricalDistribution(values) for key, values in space.items()}
        # Where the storage cannot be opened, nothing is left behind.
        with new_directory(self.out, FOLDER), self._alone():
            refuse_link(self.out / FOLDER)
            (self.out / FOLDER).mkdir(exist_ok=True)
            self.study = optuna.create_study(
                storage=opened(storage),
                study_name=name,
                pruner=PRUNERS[pruner](),
                load_if_exists=True,
            )
            was = self.study.user_attrs.get("begun")
            was = was and {current_key(key): value for key, value in was.items()}
            if was is None:
                self.study.set_user_attr("begun", begun)
            elif was != begun:
                key = next(key for key in {**was, **begun} if was.get(key) != begun.get(key))
                raise ValueError(
                    f"study {name!r} was started with {key} {was.get(key)}, got {begun.get(key)}: "
                    "what its trials share cannot change; give another --study"
                )

    def _alone(self) -> AbstractContextManager[None]:
        """Inside this context no other process with the same directory takes a trial."""
        return locked(self.out / LOCK)

    def require_data(self, fingerprint: int) -> None:
        """Raises ValueError where an earlier trial had other data, with another checksum.

        Trials of a space with settings of the data may differ in their data.
        """
        if any(key.startswith("data.") for key in self.space):
            return
        with self._alone():
            was = self.study.user_attrs.get("fingerprint")
            if was is None:
                self.study.set_user_attr("fingerprint", fingerprint)
            elif was != fingerprint:
                raise ValueError(
                    f"study {self.name!r} was started with --data whose checksum is {was:08x}, got "
                    f"{fingerprint:08x}: what its trials share cannot change; give another --study"
                )

    def all(self) -> list[FrozenTrial]:
        """All trials of the study."""
        return self.study.get_trials(deepcopy=False)

    def best(self) -> FrozenTrial | None:
        """The complete trial with the lowest loss; None where no trial is complete."""
        complete = [t for t in self.all() if t.state == TrialState.COMPLETE]
        return min(complete, key=lambda t: (t.value, t.number), default=None)

    def running(self) -> list[FrozenTrial]:
        """The trials that a process has taken and not ended."""
        return [t for t in self.all() if t.state == TrialState.RUNNING]

    def taken(self) -> list[FrozenTrial]:
        """The trials that count: without those that wait, and those repeated as another trial."""
        repeated = {t.user_attrs.get("again") for t in self.all()}
        return [t for t in self.all() if t.state != TrialState.WAITING and t.number not in repeated]

    def folder(self, trial: Trial | FrozenTrial) -> Path:
        """The directory of a trial's run, which its repetitions share."""
        return (
            self.out / FOLDER / f"{self.name}-{int(trial.user_attrs.get('run', trial.number)):04}"
        )

    @contextmanager
    def take(self, total: int) -> Iterator[Trial | None]:
        """Yields a trial that belongs to this process until the end of the block.

        It yields None where `total` trials are taken. Inside the block, call `complete`, `prune` or
        `fail`; a trial that ends otherwise is repeated by this or another process.
        """
        with ExitStack() as stack:
            with self._alone():
                self._recover()
                trial = self._ask() if len(self.taken()) < total else None
                if trial is not None:
                    stack.enter_context(self._owned(trial))
            if trial is None:
                yield None
                return
            try:
                yield trial
            except optuna.exceptions.UpdateFinishedTrialError:
                _report_lost(trial)
            except BaseException as error:
                self.give_back(trial, counts=not isinstance(error, KeyboardInterrupt))
                raise
            finally:
                stack.close()
                self.tidy()

    def _ask(self) -> Trial:
        """Asks the sampler for a trial.

        The sampler's seed depends on the number of trials, so that no two processes draw the same
        values, and a resumed study continues as an uninterrupted one.
        """
        seed = int(
            np.random.SeedSequence([self.seed % 2**64, len(self.taken())]).generate_state(1)[0]
        )
        with warnings.catch_warnings(
            action="ignore", category=optuna.exceptions.ExperimentalWarning
        ):
            self.study.sampler = SAMPLERS[self.sampler](seed)
        return self.study.ask(self.space)

    @contextmanager
    def _owned(self, trial: Trial) -> Iterator[None]:
        """Holds the lock of a trial and reports that this process is alive."""
        folder = self.folder(trial)
        refuse_link(folder)
        folder.mkdir(exist_ok=True)
        with try_lock(folder / LOCK), _heartbeat(trial):
            trial.set_user_attr("place", [MACHINE, str(folder.resolve())])
            yield

    # How a trial ends.

    def complete(self, trial: Trial, value: float, metrics: dict[str, Any]) -> None:
        """Ends a trial with its loss. metrics: JSON, for the table"""
        self._end(trial, {"figures": metrics}, values=value)

    def prune(self, trial: Trial) -> None:
        """Ends a trial that the pruner stopped."""
        self._end(trial, {}, state=TrialState.PRUNED)

    def fail(self, trial: Trial, why: str) -> None:
        """Ends a trial that failed and is not to be repeated. why: for the table"""
        self._end(trial, {"why": why}, state=TrialState.FAIL)

    def _end(self, trial: Trial, attributes: dict[str, Any], **outcome: Any) -> None:
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        self.study.tell(trial, **outcome)

    def give_back(self, trial: Trial | FrozenTrial, counts: bool = True) -> None:
        """Queues a trial to be repeated, from its last checkpoint where that is available.

        counts: whether its process ended by a failure; after RETRIES repetitions in a row for that
            reason, of which none came further than the one before, the trial is not repeated again
        """
        attributes = trial.user_attrs
        (known,) = (t for t in self.all() if t.number == trial.number)
        validations = len(known.intermediate_values)
        # A process that came further than the one before it did not end by what the trial does.
        came_further = validations > attributes.get("validations", 0)
        retries = (0 if came_further else attributes.get("retries", 0)) + counts
        try:
            self.study.tell(trial.number, state=TrialState.FAIL)
        except (optuna.exceptions.UpdateFinishedTrialError, ValueError):
            # Another process has ended the trial in the meantime; nothing else is wrong.
            _report_lost(trial)
            return
        if retries <= RETRIES:
            repetition = {
                "again": trial.number,
                "run": attributes.get("run", trial.number),
                "retries": retries,
                "validations": validations,
            }
            self.study.enqueue_trial(trial.params, user_attrs=repetition)

    def _recover(self) -> None:
        """Gives back the trials whose process is dead."""
        for trial in self.running():
            if not _is_alive(trial):
                print(f"trial {trial.number}: its process is dead, repeating it", flush=True)
                self.give_back(trial)

    def tidy(self) -> None:
        """Deletes the checkpoints of trials that have ended, except the best trial's weights."""
        with self._alone():
            best, trials = self.best(), self.all()
            active = {self.folder(t) for t in trials if not t.state.is_finished()}
            for folder in {self.folder(t) for t in trials} - active:
                for file in folder.glob("*.safetensors"):
                    if file.name != BEST or best is None or folder != self.folder(best):
                        file.unlink()

    def clear(self, trial: Trial) -> None:
        """Empties a trial's directory."""
        for path in self.folder(trial).iterdir():
            if path.name != LOCK:
                folder = path.is_dir() and not path.is_symlink()
                shutil.rmtree(path) if folder else path.unlink()


def _is_alive(trial: FrozenTrial) -> bool:
    """Whether the process of a trial is alive: by its lock on this machine, else by `beat`."""
    machine, folder = trial.user_attrs.get("place", (None, ""))
    if machine == MACHINE and Path(folder).is_dir():
        with try_lock(Path(folder) / LOCK) as free:
            return not free
    beat = trial.user_attrs.get("beat", trial.datetime_start.timestamp())
    return time.time() - beat < PATIENCE


def _report_lost(trial: Trial | FrozenTrial) -> None:
    """Reports that a trial was given to another process, e.g. because this one was suspended."""
    print(
        f"trial {trial.number} was given to another process, because this one counted as dead: "
        "its result here is dropped",
        flush=True,
    )


@contextmanager
def _heartbeat(trial: Trial) -> Iterator[None]:
    """Stores the time every BEAT seconds, in a thread, until the end of the block."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT):
            with suppress(Exception):  # the storage may be unreachable for a while
                trial.set_user_attr("beat", time.time())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
