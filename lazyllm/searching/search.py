"""`search`: Optuna proposes settings, which are tried on the same prompts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from math import log10, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.calibration.prompts import CalibrationTasks, encoded
from lazyllm.evaluation.conditions import conditions_of_model
from lazyllm.evaluation.divergence import TOKENS, DenseAnswer, forced_logits, greedy_answer, kl_divergence
from lazyllm.llm import LLM, load
from lazyllm.prompt import Prompt
from lazyllm.pruning import Pruning
from lazyllm.searching.space import Space
from lazyllm.searching.study import (
    FINISHED,
    KL,
    RUNNING,
    SETTING,
    SPEEDUP,
    STOPPED,
    Search,
    opened,
    optuna_module,
    trials,
)
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.json_text import json_digest
from lazyllm.support.progress import bar

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

BUDGET, RANGE = 40, (1.5, 3.0)
PER_KIND, SEED = 2, 101  # generated prompts of each kind and length
LEAST_PROMPTS = EVERY = 3  # prompts between two comparisons with the best setting that is as fast
ATTEMPTS = 100  # to propose a setting that is valid and new
LEAST_KL, DIGITS = 1e-9, 9
TRIED = FINISHED, STOPPED, RUNNING


def search(
    llm: LLM | str | Path,
    prompts: Sequence[Prompt] | None = None,
    speedup: tuple[float, float] = RANGE,
    budget: int = BUDGET,
    *,
    seed: int = 0,
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
    checked.whole(seed, "seed", 0)
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
    with opened(folder, facts, starts, seed) as study:
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


def run(
    llm: LLM, prompts: Sequence[Sequence[int]], space: Space, study: Study, budget: int, progress: bool
) -> None:
    """Tries settings in this process, until `budget` of them are tried or being tried by all processes."""
    states, failed = optuna_module().trial.TrialState, 0
    references: list[DenseAnswer] = []
    with bar(budget, "settings", "setting", progress) as line:
        while (n_tried := len(trials(study, *TRIED))) < budget and failed < ATTEMPTS:
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
            trial.set_user_attr(SPEEDUP, speedup)
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
    settings = [other.user_attrs[SETTING] for other in trials(study, *TRIED)]
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
            finished = [other.user_attrs for other in trials(study, FINISHED)]
            if is_worse(kl, [other[KL] for other in finished if other[SPEEDUP] >= speedup]):
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
