"""`search`: Optuna proposes settings, which are tried on the same prompts; its journal holds the trials, and
several processes may work at it."""

from __future__ import annotations

import fcntl
import json
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from math import log10, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.calibration.prompts import CalibrationTasks, encoded
from lazyllm.evaluation.conditions import conditions_of_model
from lazyllm.evaluation.divergence import TOKENS, DenseAnswer, forced_logits, greedy_answer, kl_divergence
from lazyllm.evaluation.results import differences, drop_incomplete_line
from lazyllm.evaluation.summary import DENSE_LABEL, Interval, interval
from lazyllm.llm import LLM, load
from lazyllm.methods.preset import Preset
from lazyllm.prompt import Prompt
from lazyllm.pruning import Pruning
from lazyllm.searching.space import Space
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.json_text import json_digest
from lazyllm.support.optional import package
from lazyllm.support.progress import bar
from lazyllm.support.tables import Table
from lazyllm.sweeps.points import Frame, Point, front, plot_points

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

BUDGET, RANGE = 40, (1.5, 3.0)
PER_KIND, SEED = 2, 101  # generated prompts of each kind and length
LEAST_PROMPTS = EVERY = 3  # prompts between two comparisons with the best setting that is as fast
ATTEMPTS = 100  # to propose a setting that is valid and new
LEAST_KL, DIGITS = 1e-9, 9
NAME, JOURNAL, WORKERS, PICTURE = "lazyllm", "journal.log", "workers.lock", "search.png"
FACTS = "search"  # of the study
SETTING, KL = "setting", "kl"  # of a trial
FINISHED, STOPPED, RUNNING = "COMPLETE", "PRUNED", "RUNNING"  # Optuna's states


def search(
    llm: LLM | str | Path,
    prompts: Sequence[Prompt] | None = None,
    speedup: tuple[float, float] = RANGE,
    budget: int = BUDGET,
    *,
    out: str | Path | None = None,
    progress: bool = True,
) -> Search:
    """Searches schedules and options that diverge least from dense, for counted speedups within a range.

    `budget` settings are tried, each on the same prompts: Optuna's TPE sampler proposes them, after those of
    `Pruning.for_speedup`. One that a paired test finds worse than another at least as fast is stopped.
    `prompts`: texts, lists of messages or lists of token ids, at least 3; default: generated needles.
    `out`: a folder. A search there continues, and several processes with the same folder share its budget.
    """
    try:
        low, high = (checked.number(end, "speedup") for end in speedup)
    except (TypeError, ValueError):
        raise TypeError(f"speedup must be a range such as (1.5, 3.0), not {speedup!r}") from None
    if not 1 < low < high:
        raise ValueError(f"speedup must rise from above 1, such as (1.5, 3.0), not ({low:g}, {high:g})")
    checked.whole(budget, "budget", 1)
    optuna_module()  # before the model is loaded
    model = llm if isinstance(llm, LLM) else load(llm)
    ids = prompts_of(model, prompts)
    space = Space(model.config, int(np.median([len(prompt) for prompt in ids])), low, high)
    Pruning.for_speedup(high, model.config, space.n_prompt)  # refuses one out of reach
    starts = {start.to_json(): space.parameters(start) for start in space.starts()}
    facts = {
        "model": model.config.name or model.checkpoint.path.name,
        "prompts": len(ids),
        "prompt tokens": space.n_prompt,
        "conditions": {
            **conditions_of_model(model, "auto", progress),
            "prompts sha256": json_digest(ids),
            "forced tokens": TOKENS,
            "speedup": [low, high],
        },
    }
    folder = None if out is None else user_path(out)
    with opened(folder, facts, starts) as study:
        run(model, ids, space, study, budget, progress)
        found = Search(study, folder)
    if folder is not None:
        with suppress(ImportError):  # without matplotlib there is no picture
            found.plot()
    return found


def prompts_of(llm: LLM, prompts: Sequence[Prompt] | None) -> list[list[int]]:
    """Token ids of the user's prompts, or of generated needles: of all kinds and lengths in turn, so that
    the first few are a fair sample."""
    if prompts is None:
        tasks = CalibrationTasks(llm, {}, PER_KIND, SEED)
        return [*chain.from_iterable(zip(*tasks.ids_by_kind(llm), strict=True))]
    own = list(encoded(llm, prompts, TOKENS).values())
    if len(own) < LEAST_PROMPTS:
        raise ValueError(
            f"prompts must be at least {LEAST_PROMPTS}, not {len(own)}; settings are compared by them"
        )
    return own


class Search(Frame):
    """The settings that ran on all prompts, in order. `study` is Optuna's, which has those that were stopped
    too; `folder` is None without `out`."""

    def __init__(self, study: Study, folder: Path | None) -> None:
        self.study, self.folder = study, folder
        self.facts = study.user_attrs[FACTS]
        super().__init__([point_of(trial) for trial in trials(study, FINISHED)])

    @classmethod
    def read(cls, folder: str | Path) -> Search:
        """Opens the folder of a search that has ended, was interrupted or still runs."""
        path = user_path(folder)
        if not (path / JOURNAL).exists():
            raise FileNotFoundError(f"{path} holds no search: it has no {JOURNAL}")
        return cls(optuna_module().load_study(study_name=NAME, storage=storage(path)), path)

    def pareto(self) -> Frame:
        """The Pareto front in divergence and counted speedup, slowest first."""
        return Frame(front([*self], "counted_speedup"))

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
        text = f"{self.facts['model']}: {len(self)} settings on {self.facts['prompts']} prompts"
        n_stopped = len(trials(self.study, STOPPED))
        return f"{text}, {n_stopped} more stopped early" if n_stopped else text

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

        The default `file` is search.png in the search's folder, or in the working directory without one.
        """
        dense = Point(
            DENSE_LABEL, Pruning(), self.facts["prompts"], kl=Interval(0, 0, 0), counted_speedup=1.0
        )
        target = user_path(file) if file else (self.folder or Path()) / PICTURE
        return plot_points([dense, *self], self.heading, target, "counted_speedup")


# ---- the study -------------------------------------------------------------------------------------


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
        counted_speedup=trial.values[1],
    )


@contextmanager
def opened(
    folder: Path | None, facts: Mapping[str, Any], starts: Mapping[str, dict[str, Any]]
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
        entropy = np.random.SeedSequence([len(earlier), own])
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


# ---- trials ----------------------------------------------------------------------------------------


def run(
    llm: LLM, prompts: Sequence[Sequence[int]], space: Space, study: Study, budget: int, progress: bool
) -> None:
    """Tries settings in this process, until `budget` of them are tried or being tried by all processes."""
    states, failed = optuna_module().trial.TrialState, 0
    references: list[DenseAnswer] = []
    with bar(budget, "settings", "setting", progress) as line:
        while (n_tried := len(trials(study, FINISHED, STOPPED, RUNNING))) < budget and failed < ATTEMPTS:
            line.update(n_tried - line.n)
            references = references or [
                greedy_answer(llm.session(), ids, TOKENS, llm.eos_token_ids) for ids in prompts
            ]
            trial = study.ask()
            pruning = claimed(study, trial, space)
            failed = 0 if pruning else failed + 1
            if pruning is None:
                study.tell(trial, state=states.FAIL)
                continue
            speedup = round(space.speedup(pruning), 2)  # schedules for the same one differ in the third digit
            kl = divergences(llm, pruning, prompts, references, study, speedup)
            trial.set_user_attr(KL, kl)
            if len(kl) < len(prompts):
                study.tell(trial, state=states.PRUNED)
            else:  # by its logarithm, halving a small divergence counts as much as halving a large one
                study.tell(trial, [log10(max(float(np.mean(kl)), LEAST_KL)), speedup])
        line.update(n_tried - line.n)
    if failed == ATTEMPTS:
        warnings.warn(
            f"no new setting was found in {ATTEMPTS} attempts for a budget of {budget}; the range of "
            "speedups may be too narrow",
            stacklevel=3,
        )


def claimed(study: Study, trial: Trial, space: Space) -> Pruning | None:
    """The trial's setting, unless it is not in the space or another trial has it. Of two processes that claim
    one at the same moment neither gets it, as each writes its claim before it looks."""
    proposed, start = space.proposed(trial), trial.user_attrs.get(SETTING)
    pruning = Pruning.from_json(start) if start else proposed
    if pruning is None:
        return None
    setting = pruning.to_json()
    trial.set_user_attr(SETTING, setting)
    settings = [other.user_attrs[SETTING] for other in trials(study, FINISHED, STOPPED, RUNNING)]
    return pruning if settings.count(setting) == 1 else None


def divergences(
    llm: LLM,
    pruning: Pruning,
    prompts: Sequence[Sequence[int]],
    references: Sequence[DenseAnswer],
    study: Study,
    speedup: float,
) -> list[float]:
    """The divergence on each prompt; of a setting that is worse than another as fast, on the first ones."""
    kl: list[float] = []
    for ids, reference in zip(prompts, references, strict=True):
        if kl and len(kl) % EVERY == 0:
            as_fast = [other for other in trials(study, FINISHED) if other.values[1] >= speedup]
            if is_worse(kl, [other.user_attrs[KL] for other in as_fast]):
                break
        kl.append(round(divergence(llm, pruning, ids, reference), DIGITS))
    return kl


def divergence(llm: LLM, pruning: Pruning, ids: Sequence[int], reference: DenseAnswer) -> float:
    """From dense, in nats per token of dense's answer."""
    logits = np.array([*forced_logits(llm.session(pruning), ids, reference.tokens)])
    return float(kl_divergence(reference.logits, logits).mean())


def is_worse(kl: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
    """True if a setting diverges more on its prompts so far than the best of `others` on the same ones.

    It does so in the mean, and typically by a factor that is above 1 by more than its standard error. The
    factor varies less between prompts than the difference; the mean counts.
    """
    if not others:
        return False
    mine, best = np.array([kl, min(others, key=np.mean)[: len(kl)]])
    factors = np.log(mine.clip(min=LEAST_KL) / best.clip(min=LEAST_KL))
    standard_error = factors.std(ddof=1) / sqrt(len(factors))
    return bool(mine.mean() > best.mean() and factors.mean() > standard_error)
