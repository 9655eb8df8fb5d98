"""Study: the Optuna study in a search's folder, at which several processes may work without a server.

The journal file holds everything that a search knows. A process that works at the study locks a file of its
own; the kernel releases it however the process ends, and another one does what it had begun. All locks are
flock's: several machines need a file system that shares them, as NFS 4 does.
"""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lazyllm.evaluation.results import drop_incomplete_line
from lazyllm.pruning import Pruning
from lazyllm.searching.prompts import Result
from lazyllm.searching.space import Space
from lazyllm.support.files import locked

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, Trial

NAME, JOURNAL, WORKERS = "lazyllm", "journal.log", "workers"
CLAIM_LOCK, JOURNAL_LOCK = "claim.lock", "journal.lock"
CONDITIONS, SETTING, SPEEDUP = "conditions", "setting", "counted speedup"
WORKER, PROMPT, REFUSED = "worker", "prompt", "refused"
RANDOM_TRIALS = 10  # before the sampler learns from them, starting points included
ATTEMPTS = 100  # to propose a setting that is valid and new
LEARNED_ATTEMPTS = 20  # of them; later ones are random, as what was learned leads to what was tried
LEAST_KL = 1e-9  # for the logarithm
DIGITS = 9


@dataclass(frozen=True)
class Record:
    """One setting and what is known of it; `results` is by prompt, in order, and shorter if it was `stopped`
    or still runs."""

    number: int
    pruning: Pruning
    speedup: float
    results: tuple[Result, ...] = field(repr=False)
    done: bool
    stopped: bool

    @property
    def shown_speedup(self) -> float:
        """To two decimals: schedules for the same speedup differ in the third."""
        return round(self.speedup, 2)

    @property
    def loss(self) -> float:
        """The mean KL divergence over the prompts that were run."""
        return sum(one.kl for one in self.results) / len(self.results)


class Study:
    """A context manager; `conditions` are what the results depend on."""

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        self._folder, self._conditions = folder, conditions
        self._worker = uuid.uuid4().hex

    def __enter__(self) -> Self:
        (self._folder / WORKERS).mkdir(parents=True, exist_ok=True)
        with self._alone():
            with locked(self._folder / JOURNAL_LOCK):
                drop_incomplete_line(self._folder / JOURNAL)
            self._study = opened(self._folder)
            check_conditions(self._study, self._conditions, self._folder)
            self._alive = locked(self._worker_file(self._worker))
        return self

    def __exit__(self, *_: object) -> None:
        self._alive.close()
        self._worker_file(self._worker).unlink(missing_ok=True)

    @property
    def records(self) -> list[Record]:
        return records_of(self._study)

    def claim(self, space: Space, starts: Sequence[Pruning], budget: int, seed: int) -> Claim | None:
        """A setting for this process to try: one that a dead process has left, or the next of `starts`, or a
        new one that the sampler proposes. None if `budget` settings are tried or being tried, or if the
        sampler has no other, of which it warns."""
        with self._alone():
            known = [one for one in self._trials() if is_setting(one) and not self._is_left(one)]
            if len(known) >= budget:
                return None
            self._enqueue(space, starts, np.random.default_rng([seed, len(known)]))
            for attempt in range(ATTEMPTS):
                # a seed of its own for each: the same search gives the same settings, resumed or not
                self._study.sampler = sampler([seed, len(known), attempt], attempt < LEARNED_ATTEMPTS)
                trial = self._study.ask()
                proposed, given = space.proposed(trial), trial.user_attrs.get(SETTING)
                pruning = Pruning.from_json(given) if given else proposed
                if refused := self._refused(trial, pruning):
                    trial.set_user_attr(REFUSED, refused)
                    self._study.tell(trial, state=states().FAIL)
                    continue
                assert pruning is not None
                speedup = space.speedup(pruning)
                trial.set_user_attr(SPEEDUP, speedup)
                trial.set_user_attr(SETTING, pruning.to_json())
                trial.set_user_attr(WORKER, self._worker)
                return Claim(self._study, trial, pruning, speedup)
        told = f"no new setting was found in {ATTEMPTS} attempts; the range of speedups may be too narrow"
        if not any(map(is_setting, self._trials())):
            raise RuntimeError(told)
        warnings.warn(f"{told} for a budget of {budget}", stacklevel=2)
        return None

    def _enqueue(self, space: Space, starts: Sequence[Pruning], random: np.random.Generator) -> None:
        """Queues a setting that the sampler does not propose: one that a dead process had begun, with its
        results; else the next of `starts`; else, every second time, a neighbour of one on the front."""
        for one in filter(self._is_left, self._trials()):
            if SETTING in one.user_attrs:
                left = {name: value for name, value in one.user_attrs.items() if name != WORKER}
                # one that was queued itself may have died before it took all of its parameters
                parameters = {**one.system_attrs.get("fixed_params", {}), **one.params}
                self._study.enqueue_trial(parameters, user_attrs=left)
            self._study.tell(one.number, state=states().FAIL)
            if SETTING in one.user_attrs:
                return
        if any(one.state == states().WAITING for one in self._trials()):
            return  # a process has died between queueing this one and running it
        known = {one.user_attrs[SETTING] for one in self._trials() if is_setting(one)}
        new = next((one for one in starts if one.to_json() not in known), None)
        if new is not None:
            self._study.enqueue_trial(space.parameters(new), user_attrs={SETTING: new.to_json()})
        elif len(known) % 2 and (front := front_of(self.records)):
            chosen = front[random.integers(len(front))]
            self._study.enqueue_trial(space.neighbour(chosen.pruning, random))

    def _refused(self, trial: Trial, pruning: Pruning | None) -> str | None:
        if pruning is None:
            return "outside of the range"
        others = (one for one in self._trials() if one.number != trial.number and is_setting(one))
        twin = next((one for one in others if one.user_attrs[SETTING] == pruning.to_json()), None)
        return None if twin is None else f"the same as trial {twin.number}"

    def _is_left(self, trial: FrozenTrial) -> bool:
        """True for what a process had begun that does not live any more."""
        if trial.state != states().RUNNING:
            return False
        worker = self._worker_file(trial.user_attrs.get(WORKER, "none"))
        if not worker.exists():
            return True
        try:
            locked(worker, wait=False).close()
        except BlockingIOError:
            return False
        return True

    def _worker_file(self, worker: str) -> Path:
        return self._folder / WORKERS / worker

    def _trials(self) -> list[FrozenTrial]:
        return list(self._study.get_trials(deepcopy=False))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process claims or takes over meanwhile."""
        with locked(self._folder / CLAIM_LOCK):
            yield


class Claim:
    """A trial that this process runs."""

    def __init__(self, study: optuna.Study, trial: Trial, pruning: Pruning, speedup: float) -> None:
        self._study, self._trial = study, trial
        self.pruning, self.speedup = pruning, speedup
        self.results = list(results_of(trial.user_attrs))

    def add(self, result: Result) -> None:
        """The result of the next prompt, written at once."""
        name = f"{PROMPT} {len(self.results)}"
        self._trial.set_user_attr(name, {"kl": round(result.kl, DIGITS), "same": result.same})
        self.results.append(result)

    def finish(self) -> None:
        loss = sum(one.kl for one in self.results) / len(self.results)
        # by its logarithm, halving a small divergence counts as much as halving a large one
        self._study.tell(self._trial, [log10(max(loss, LEAST_KL)), self.speedup])

    def stop(self) -> None:
        self._study.tell(self._trial, state=states().PRUNED)


def read(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """The conditions and the records of a search."""
    if not (folder / JOURNAL).exists():
        raise FileNotFoundError(f"{folder} holds no search: it has no {JOURNAL}")
    study = optuna_module().load_study(study_name=NAME, storage=storage(folder))
    return study.user_attrs[CONDITIONS], records_of(study)


def storage(folder: Path) -> Any:
    storages = optuna_module().storages
    lock = JournalLock(folder / JOURNAL_LOCK)
    return storages.JournalStorage(storages.journal.JournalFileBackend(str(folder / JOURNAL), lock))


def opened(folder: Path) -> optuna.Study:
    """The study of the folder, made if there is none."""
    optuna = optuna_module()
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(
            study_name=NAME,
            storage=storage(folder),
            directions=["minimize", "maximize"],
            load_if_exists=True,
        )
    finally:
        optuna.logging.set_verbosity(level)


def check_conditions(study: optuna.Study, conditions: Mapping[str, Any], folder: Path) -> None:
    """The conditions of the first process are kept; those of others must be equal."""
    before = study.user_attrs.get(CONDITIONS)
    if before is None:
        study.set_user_attr(CONDITIONS, dict(conditions))
        return
    now = json.loads(json.dumps(conditions))
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        told = "; ".join(f"{name} was {before.get(name)} and is now {now.get(name)}" for name in changed)
        raise ValueError(f"{folder} holds a search under other conditions: {told}. Give another folder")


def sampler(entropy: Sequence[int], learned: bool) -> Any:
    """Optuna's sampler that learns from the trials, or the random one."""
    optuna = optuna_module()
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    if not learned:
        return optuna.samplers.RandomSampler(seed)
    with warnings.catch_warnings():  # constant_liar is experimental in Optuna 4
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            n_startup_trials=RANDOM_TRIALS,
            constant_liar=True,  # what others try now counts as bad, so that it is not proposed again
            seed=seed,
        )


def is_setting(trial: FrozenTrial) -> bool:
    """True for what was run, to the end or not, or is being run."""
    state = states()
    return SETTING in trial.user_attrs and trial.state in (state.RUNNING, state.COMPLETE, state.PRUNED)


def records_of(study: optuna.Study) -> list[Record]:
    state, made = states(), []
    for one in study.get_trials(deepcopy=False):
        if is_setting(one) and (results := tuple(results_of(one.user_attrs))):
            pruning = Pruning.from_json(one.user_attrs[SETTING])
            done, stopped = one.state == state.COMPLETE, one.state == state.PRUNED
            made.append(Record(one.number, pruning, one.user_attrs[SPEEDUP], results, done, stopped))
    return made


def front_of(records: Iterable[Record]) -> list[Record]:
    """The Pareto front in divergence and counted speedup of those that ran on all prompts, slowest first:
    settings to which no other is equal or better in both and better in one. Speedups are compared to two
    decimals."""
    front: list[Record] = []
    for one in sorted(filter(lambda one: one.done, records), key=lambda one: (-one.shown_speedup, one.loss)):
        if not front or one.loss < front[-1].loss:
            front.append(one)
    return front[::-1]


def results_of(attributes: Mapping[str, Any]) -> Iterator[Result]:
    for number in count():
        if (name := f"{PROMPT} {number}") not in attributes:
            return
        yield Result(**attributes[name])


def states() -> Any:
    return optuna_module().trial.TrialState


def optuna_module() -> Any:
    try:
        import optuna
    except ImportError:
        raise ImportError("a search needs optuna: pip install 'lazyllm-engine[search]'") from None
    return optuna


class JournalLock:
    """For Optuna, in place of its own lock, which stays for half a minute if its process is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def acquire(self) -> bool:
        self._file = locked(self._path)
        return True

    def release(self) -> None:
        self._file.close()
