"""The study of a search: Optuna's journal of all trials, at which several processes may work; its results."""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.evaluation.intervals import Interval, interval
from lazyllm.evaluation.manifest import differences
from lazyllm.evaluation.results import drop_incomplete_line
from lazyllm.evaluation.summary import DENSE_LABEL
from lazyllm.methods.preset import Preset
from lazyllm.pruning import Pruning
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.optional import package
from lazyllm.support.tables import Table
from lazyllm.sweeps.points import Frame, Point, front, plot_points

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

NAME = "lazyllm"
JOURNAL, WORKERS, PICTURE = "journal.log", "workers.lock", "search.png"
FACTS = "search"  # of the study
SETTING, SPEEDUP, KL = "setting", "speedup", "kl"  # of a trial
FINISHED, STOPPED, RUNNING = "COMPLETE", "PRUNED", "RUNNING"  # Optuna's states


class Search(Frame):
    """The settings that were tried, in order; `study` is Optuna's, `folder` None without `out`."""

    def __init__(self, study: Study, folder: Path | None) -> None:
        self.study, self.folder = study, folder
        self.facts = study.user_attrs[FACTS]
        super().__init__([point_of(trial) for trial in trials(study, FINISHED, STOPPED)])

    @classmethod
    def read(cls, folder: str | Path) -> Search:
        """Opens the folder of a search that has ended, was interrupted or still runs."""
        path = user_path(folder)
        if not (path / JOURNAL).exists():
            raise FileNotFoundError(f"{path} holds no search: it has no {JOURNAL}")
        return cls(optuna_module().load_study(study_name=NAME, storage=storage(path)), path)

    @property
    def finished(self) -> list[Point]:
        """The settings that ran on all prompts."""
        return [point for point in self if not point.stopped]

    def pareto(self) -> Frame:
        """The Pareto front in divergence and counted speedup, slowest first; none of it was stopped."""
        return Frame(front(self.finished, "counted_speedup"))

    def best(self, speedup: float) -> Point:
        """The setting with the least divergence that has at least this counted speedup, to two decimals."""
        wished, on_front = round(checked.number(speedup, "speedup"), 2), self.pareto()
        if not len(on_front):
            raise ValueError("the search has no finished trial yet")
        for point in on_front:
            if point.counted_speedup >= wished:
                return point
        fastest = on_front[-1].counted_speedup
        raise ValueError(f"no setting has a speedup of {speedup:g}; the fastest has {fastest:.2f}")

    def preset(self, speedup: float) -> Preset:
        """`best` as a preset, with the front as its evidence."""
        best = self.best(speedup).pruning
        tried = [(point.pruning, point.counted_speedup, {"kl": point.kl}) for point in self.pareto()]
        prompts = {"search": self.facts["prompts"], "tokens": self.facts["prompt tokens"]}
        return Preset.found(best, self.facts, prompts, tried)

    @property
    def heading(self) -> str:
        n_finished = len(self.finished)
        text = f"{self.facts['model']}: {n_finished} settings on {self.facts['prompts']} prompts"
        return f"{text}, {len(self) - n_finished} stopped early" if n_finished < len(self) else text

    @property
    def table(self) -> Table:
        """The Pareto front."""
        return self.pareto().table

    def text(self) -> str:
        """The front as a table for a terminal."""
        return f"{self.heading}\n\n{self.table.title}\n\n{self.table.text()}"

    __repr__ = text

    def plot(self, file: str | Path | None = None) -> Path:
        """Draws divergence against counted speedup with the Pareto front; needs matplotlib.

        Settings that were stopped early ran on fewer prompts and are left out. The default `file` is
        search.png in the search's folder, or in the working directory without one.
        """
        dense = Point(
            DENSE_LABEL, Pruning(), self.facts["prompts"], kl=Interval(0, 0, 0), counted_speedup=1.0
        )
        target = user_path(file) if file else (self.folder or Path()) / PICTURE
        return plot_points([dense, *self.finished], self.heading, target, "counted_speedup")


def trials(study: Study, *states: str) -> list[FrozenTrial]:
    """The trials in these states that have a setting."""
    every = study.get_trials(deepcopy=False)
    return [trial for trial in every if trial.state.name in states and SETTING in trial.user_attrs]


def point_of(trial: FrozenTrial) -> Point:
    kl = np.array(trial.user_attrs[KL])
    pruning = Pruning.from_json(trial.user_attrs[SETTING])
    return Point(
        pruning.label,
        pruning,
        prompts=len(kl),
        kl=interval([[kl]], 0.0),
        kl_median=float(np.median(kl)),
        counted_speedup=trial.user_attrs[SPEEDUP],
        stopped=trial.state.name == STOPPED,
    )


@contextmanager
def opened(
    folder: Path | None, facts: Mapping[str, Any], starts: Mapping[str, dict[str, Any]], seed: int
) -> Iterator[Study]:
    """The study in the folder, or one in memory, with these facts; refused if it has other conditions. The
    `starts`, parameters by setting, are queued in a new one.

    A process shares the lock of WORKERS with others while it runs trials. One that can have it alone knows
    that killed processes have left half a line, the journal's lock, and the trials that seem to run, which it
    queues again: Optuna's journal has no heartbeat.
    """
    with ExitStack() as stack:
        alone = True
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            workers = stack.enter_context((folder / WORKERS).open("a"))
            try:
                fcntl.flock(workers, fcntl.LOCK_EX | fcntl.LOCK_NB)
                drop_incomplete_line(folder / JOURNAL)
                (folder / f"{JOURNAL}.lock").unlink(missing_ok=True)
            except BlockingIOError:
                fcntl.flock(workers, fcntl.LOCK_SH)  # waits until the first process has queued the starts
                alone = False
        study = created(folder)
        before, now = study.user_attrs.get(FACTS, facts), json.loads(json.dumps(facts))
        if changed := differences(before["conditions"], now["conditions"]):
            raise ValueError(
                f"{folder} holds a search under other conditions: {changed}. Give another folder"
            )
        study.set_user_attr(FACTS, dict(facts))
        earlier = study.get_trials(deepcopy=False)
        known = {trial.user_attrs.get(SETTING) for trial in earlier}
        waiting = {setting: point for setting, point in starts.items() if setting not in known}
        for trial in trials(study, RUNNING) if alone else []:
            study.tell(trial.number, state=optuna_module().trial.TrialState.FAIL)
            waiting[trial.user_attrs[SETTING]] = trial.params
        for setting, point in waiting.items():
            study.enqueue_trial(point, {SETTING: setting})
        own = 0 if alone else secrets.randbits(32)  # each process proposes other settings
        entropy = np.random.SeedSequence([seed, len(earlier), own])
        study.sampler = optuna_module().samplers.TPESampler(
            constant_liar=True,  # what others try now counts as bad, so that it is not proposed again
            seed=int(entropy.generate_state(1)[0]),
        )
        if folder is not None:
            fcntl.flock(workers, fcntl.LOCK_SH)
        yield study


def created(folder: Path | None) -> Study:
    """The study in the folder, made if there is none; without a folder one in memory."""
    optuna = optuna_module()
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study: Study = optuna.create_study(
            study_name=NAME,
            storage=folder and storage(folder),
            directions=["minimize", "maximize"],
            load_if_exists=True,
        )
    finally:
        optuna.logging.set_verbosity(level)
    return study


def storage(folder: Path) -> Any:
    storages = optuna_module().storages
    # absolute: the journal's lock is a symbolic link to it
    return storages.JournalStorage(storages.journal.JournalFileBackend(str((folder / JOURNAL).absolute())))


def optuna_module() -> Any:
    return package("optuna", "a search", "search")
