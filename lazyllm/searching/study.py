"""The study in a search's folder: Optuna's journal of all trials, at which several processes may work."""

from __future__ import annotations

import fcntl
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.evaluation.results import differences, drop_incomplete_line
from lazyllm.support.optional import package

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

NAME = "lazyllm"
JOURNAL, WORKERS = "journal.log", "workers.lock"
FACTS = "search"  # of the study
SETTING, SPEEDUP, KL = "setting", "speedup", "kl"  # of a trial


@contextmanager
def opened(
    folder: Path | None, facts: Mapping[str, Any], starts: Mapping[str, dict[str, Any]], seed: int
) -> Iterator[Study]:
    """The study in the folder, or one in memory, with these facts; refused if it has other conditions. The
    `starts`, parameters by setting, are queued in a new one.

    A process shares the lock of WORKERS with others while it runs trials. One that can have it alone knows
    that the trials that run were left by processes that were killed: Optuna's journal has no heartbeat.
    """
    draw = 0
    with ExitStack() as stack:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            workers = stack.enter_context((folder / WORKERS).open("a"))
            try:
                fcntl.flock(workers, fcntl.LOCK_EX | fcntl.LOCK_NB)
                tidy(folder)
            except BlockingIOError:
                fcntl.flock(workers, fcntl.LOCK_SH)  # waits until the first process has queued the starts
                draw = secrets.randbits(32)  # each process proposes other settings
        study = created(folder)
        before, now = study.user_attrs.get(FACTS, facts), json.loads(json.dumps(facts))
        if changed := differences(before["conditions"], now["conditions"]):
            raise ValueError(
                f"{folder} holds a search under other conditions: {changed}. Give another folder"
            )
        study.set_user_attr(FACTS, dict(facts))
        trials = study.get_trials(deepcopy=False)
        known = {trial.user_attrs.get(SETTING) for trial in trials}
        for setting in [start for start in starts if start not in known]:
            study.enqueue_trial(starts[setting], {SETTING: setting})
        entropy = np.random.SeedSequence([seed, len(trials), draw])
        study.sampler = optuna_module().samplers.TPESampler(
            constant_liar=True,  # what others try now counts as bad, so that it is not proposed again
            seed=int(entropy.generate_state(1)[0]),
        )
        if folder is not None:
            fcntl.flock(workers, fcntl.LOCK_SH)
        yield study


def tidy(folder: Path) -> None:
    """Removes what killed processes left: half a line, the journal's lock, and trials that seem to run, whose
    settings are queued again."""
    drop_incomplete_line(folder / JOURNAL)
    (folder / f"{JOURNAL}.lock").unlink(missing_ok=True)
    study = created(folder)
    for trial in study.get_trials(deepcopy=False, states=[states().RUNNING]):
        study.tell(trial.number, state=states().FAIL)
        if SETTING in trial.user_attrs:
            parameters = trial.system_attrs.get("fixed_params", trial.params)
            study.enqueue_trial(parameters, {SETTING: trial.user_attrs[SETTING]})


def stored(folder: Path) -> Study:
    """The study in the folder, which this does not write to."""
    if (folder / JOURNAL).exists():
        study: Study = optuna_module().load_study(study_name=NAME, storage=storage(folder))
        return study
    raise FileNotFoundError(f"{folder} holds no search: it has no {JOURNAL}")


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


def tried(study: Study) -> list[FrozenTrial]:
    """The trials whose settings were tried or are being tried."""
    state = states()
    trials = study.get_trials(deepcopy=False, states=[state.COMPLETE, state.PRUNED, state.RUNNING])
    return [trial for trial in trials if SETTING in trial.user_attrs]


def states() -> Any:
    return optuna_module().trial.TrialState


def optuna_module() -> Any:
    return package("optuna", "a search", "search")
