"""`search`: Optuna proposes settings, which are tried on the same prompts, in the folder of a sweep."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log10, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lazyllm.calibration.prompts import CalibrationTasks
from lazyllm.evaluation.measures import TOKENS, Divergence
from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.run import run_items
from lazyllm.evaluation.summary import DENSE_LABEL, Row, Summary, failure, mean
from lazyllm.llm import LLM, load
from lazyllm.methods.preset import Preset
from lazyllm.prompt import Prompt
from lazyllm.pruning import DENSE, Pruning
from lazyllm.searching.space import LEVELS, Space
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.json_text import json_digest
from lazyllm.support.optional import package
from lazyllm.support.signatures import takes
from lazyllm.support.tables import Table
from lazyllm.sweeps.points import Point
from lazyllm.sweeps.sweep import Measured, settings_in

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

BUDGET, RANGE = 40, (1.5, 3.0)
PER_KIND, SEED = 2, 101  # generated prompts of each kind and length
LEAST_PROMPTS = 3
BATCH = LEVELS  # settings that run on a prompt in turn, so that dense's answer is computed once for all
ATTEMPTS = 100  # to propose a setting that is valid and new
LEAST_KL = 1e-9
SPEEDUPS = "counted speedups"  # of the conditions in the manifest, by setting


@takes(RunOptions, "wrapper", "warm_ups", "on_row")
def search(
    llm: LLM | str | Path,
    prompts: Sequence[Prompt] | None = None,
    speedup: tuple[float, float] = RANGE,
    budget: int = BUDGET,
    *,
    out: str | Path | None = None,
    **options: Any,
) -> Search:
    """Searches schedules and options that diverge least from dense, for counted speedups within a range.

    `budget` settings are tried, each on the same prompts: Optuna's TPE sampler proposes them, after those of
    `Pruning.for_speedup`. `prompts`: texts, lists of messages or lists of token ids, at least 3; default:
    generated needles. `out`: a folder, in which an interrupted search continues. `workers`, `scheduler`,
    `worker_device`, `worker_threads` and `progress` are those of `lazyllm.sweep`.
    """
    try:
        low, high = (checked.number(end, "speedup") for end in speedup)
    except (TypeError, ValueError):
        raise TypeError(f"speedup must be a range such as (1.5, 3.0), not {speedup!r}") from None
    if not 1 < low < high:
        raise ValueError(f"speedup must rise from above 1, such as (1.5, 3.0), not ({low:g}, {high:g})")
    checked.whole(budget, "budget", 1)
    checked.a_list(prompts, "prompts", '["a text"]')
    study = new_study()  # before the model is loaded
    model = llm if isinstance(llm, LLM) else load(llm)
    if prompts is not None and len(prompts) < LEAST_PROMPTS:
        raise ValueError(f"prompts must be at least {LEAST_PROMPTS}, not {len(prompts)}: settings are compared by them")
    tasks = CalibrationTasks(model, prompts or (), PER_KIND, SEED, () if prompts else None)
    space = Space(model.config_for(high), tasks.median_length, low, high)
    for start in space.starts():
        study.enqueue_trial(start)
    settings: dict[str, Pruning] = {DENSE_LABEL: DENSE}
    speedups = {DENSE_LABEL: 1.0}
    conditions = {
        "measure": "kl",
        "forced tokens": TOKENS,
        "prompts sha256": json_digest(tasks.ids),
        "prompt tokens": space.n_prompt,
        SPEEDUPS: speedups,
    }
    run_options = RunOptions(warm_ups=0, **options)
    folder = None if out is None else user_path(out)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="lazyllm-") as scratch:
        place = folder or Path(scratch)
        while (batch := proposals(study, space, settings, budget)) or not rows:
            speedups |= {label: round(space.speedup(settings[label]), 2) for label in batch}
            tried, measure = {label: settings[label] for label in (DENSE_LABEL, *batch)}, Divergence(TOKENS)
            rows, manifest = run_items(model, tried, tasks, place, run_options, measure, conditions)
            summary = Summary([row for row in rows if row["setting"] in tried], category=str)
            for row in summary.failed:
                raise RuntimeError(failure(row))
            for label, trial in batch.items():
                # by its logarithm, halving a small divergence counts as much as halving a large one
                loss = log10(max(mean(summary.values(label, "kl")), LEAST_KL))
                study.tell(trial, [loss, speedups[label]])
    found = Search(rows, manifest, folder, settings_in(manifest, {}))
    found.study = study
    if folder:
        found.report()
    if len(settings) <= budget:
        warnings.warn(
            f"no new setting was found in {ATTEMPTS} attempts for a budget of {budget}; the range of "
            "speedups may be too narrow",
            stacklevel=3,
        )
    return found


def new_study() -> Study:
    """A study in memory. Its sampler has a seed: a search that continues has its first proposals again."""
    optuna = package("optuna", "a search", "search")
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # with constant_liar, the proposals of a batch differ
    sampler = optuna.samplers.TPESampler(constant_liar=True, seed=SEED)
    study: Study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    optuna.logging.set_verbosity(level)
    return study


def proposals(study: Study, space: Space, settings: dict[str, Pruning], budget: int) -> dict[str, Trial]:
    """The next BATCH trials by label; their settings are new and added to `settings`. There are fewer at the end
    of the budget, or if ATTEMPTS attempts find fewer."""
    trials: dict[str, Trial] = {}
    states = package("optuna.trial", "a search", "search").TrialState
    for _ in range(ATTEMPTS):
        if len(trials) == BATCH or len(settings) > budget:  # dense is not counted
            break
        trial = study.ask()
        pruning = space.proposed(trial)
        if pruning is None or pruning.label in settings:
            study.tell(trial, state=states.FAIL)
        else:
            settings[pruning.label], trials[pruning.label] = pruning, trial
    return trials


class Search(Measured):
    """The settings that were tried, dense first. `study` is Optuna's; None if the search was read from a folder."""

    speedup = "counted_speedup"
    study: Study | None = None

    def _points_of(self, rows: Sequence[Row]) -> list[Point]:
        """With the speedups that were counted for the median length of the prompts."""
        counted: Mapping[str, float] = self.manifest["conditions"][SPEEDUPS]
        return [replace(point, counted_speedup=counted[point.setting]) for point in super()._points_of(rows)]

    @property
    def table(self) -> Table:
        """The Pareto front."""
        return self.pareto().table

    def best(self, speedup: float) -> Point:
        """The setting with the least divergence that has at least this counted speedup, to two decimals."""
        wished = round(checked.number(speedup, "speedup"), 2)
        for point in self.pareto():
            if point.counted_speedup >= wished:
                return point
        fastest = max((point.counted_speedup for point in self.compared), default=nan)
        raise ValueError(f"no setting has a speedup of {speedup:g}; the fastest has {fastest:.2f}")

    def preset(self, speedup: float) -> Preset:
        """`best` as a preset, with the front as its evidence."""
        best = self.best(speedup)
        tried = [(point.pruning, point.counted_speedup, {"kl": point.kl}) for point in self.pareto()]
        prompts = {"search": best.prompts, "tokens": self.manifest["conditions"]["prompt tokens"]}
        return Preset.found(best.pruning, self.manifest, prompts, tried)
