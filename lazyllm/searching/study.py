"""The study in a search's folder: Optuna's journal of all trials, at which several processes may work."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.evaluation.manifest import differences
from lazyllm.evaluation.results import drop_incomplete_line
from lazyllm.support.optional import package

if TYPE_CHECKING:
    from optuna.study import Study

NAME = "lazyllm"
JOURNAL, WORKERS = "journal.log", "workers.lock"
FACTS, PROCESSES = "search", "processes"  # attributes of the study
SETTING, SPEEDUP, KL = "setting", "speedup", "kl"  # of a trial


@contextmanager
def opened(
    folder: Path | None, facts: Mapping[str, Any], starts: Mapping[str, dict[str, Any]]
) -> Iterator[Study]:
    """The study in the folder, or one in memory, with these facts; refused if it has other conditions. The
    `starts`, parameters by setting, are queued, if they were not yet tried.

    A process shares the lock of WORKERS with others while it runs trials. One that can have it alone knows
    that the trials that run were left by processes that were killed: Optuna's journal has no heartbeat.
    """
    with ExitStack() as stack:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            workers = stack.enter_context((folder / WORKERS).open("a"))
            with suppress(BlockingIOError):
                fcntl.flock(workers, fcntl.LOCK_EX | fcntl.LOCK_NB)
                tidy(folder)
            fcntl.flock(workers, fcntl.LOCK_SH)
        study = created(folder)
        before, now = study.user_attrs.get(FACTS, facts), json.loads(json.dumps(facts))
        if changed := differences(before["conditions"], now["conditions"]):
            raise ValueError(
                f"{folder} holds a search under other conditions: {changed}. Give another folder"
            )
        study.set_user_attr(FACTS, dict(facts))
        study.set_user_attr(PROCESSES, study.user_attrs.get(PROCESSES, 0) + 1)  # each draws other settings
        for setting, parameters in starts.items():
            if setting not in settings_of(study):
                study.enqueue_trial(parameters, user_attrs={SETTING: setting})
        yield study


def tidy(folder: Path) -> None:
    """Removes what killed processes left: half a line, the journal's lock, trials that seem to run."""
    drop_incomplete_line(folder / JOURNAL)
    (folder / f"{JOURNAL}.lock").unlink(missing_ok=True)
    study = created(folder)
    for trial in study.get_trials(deepcopy=False, states=[states().RUNNING]):
        study.tell(trial.number, state=states().FAIL)


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
    storages, file = optuna_module().storages, str(folder / JOURNAL)
    # the other kind of lock, a symbolic link, is waited for without end if the path is relative
    lock = storages.journal.JournalFileOpenLock(file)
    return storages.JournalStorage(storages.journal.JournalFileBackend(file, lock))


def settings_of(study: Study, *left_out: str) -> list[str]:
    """As JSON: the settings that were tried, are being tried or wait for it, without those of trials in a
    state of `left_out`."""
    return [
        trial.user_attrs[SETTING]
        for trial in study.get_trials(deepcopy=False)
        if SETTING in trial.user_attrs and trial.state.name not in ("FAIL", *left_out)
    ]


def states() -> Any:
    return optuna_module().trial.TrialState


def optuna_module() -> Any:
    return package("optuna", "a search", "search")
