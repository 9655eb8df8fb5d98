"""Trials: the best schedules on prompts kept back, by needles found and by their divergence from dense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lazyllm.calibration.prompts import OWN
from lazyllm.evaluation.divergence import Divergence
from lazyllm.evaluation.intervals import Interval, interval
from lazyllm.evaluation.runner import label_of
from lazyllm.evaluation.summary import DENSE_LABEL, Row
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Trial, scored_answer
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning

DIGITS = 6
Plain = list[float | None]
"""Value, low and high of an interval; None for a bound that is not known."""


class TrialMeasure:
    """A measure of the runner: the divergence from dense, and the score where the prompt hides needles."""

    def __init__(self, tokens: int) -> None:
        self._divergence = Divergence(tokens)

    def __call__(self, llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
        fields = {} if trial.key.setting == DENSE_LABEL else self._divergence(llm, tasks, trial)
        return fields | ({} if trial.key.dataset == OWN else scored_answer(llm, tasks, trial))


def results(rows: Sequence[Row], prunings: Sequence[Pruning]) -> dict[Pruning, dict[str, Any]]:
    """By setting, dense and `prunings`, the value, low and high of 95 % intervals.

    `needles` found are in percent, `needles_to_dense` is the difference to dense's; `kl` is from dense, and
    `kl_to_baseline` the difference to that of the first of `prunings`. Differences are of the same prompts.
    Prompts are one sample: with a few of each kind, all found or none, the kinds by themselves would vary too
    little.
    """

    def values(pruning: Pruning, field: str) -> dict[tuple[str, str], float]:
        label = label_of(pruning)
        own = [row for row in rows if row["setting"] == label and field in row]
        return {(row["dataset"], row["item"]): row[field] for row in own}

    def mean(pruning: Pruning, field: str, to: Pruning | None = None) -> Plain:
        scale, most = (100.0, 100.0) if field == "score" else (1.0, math.inf)
        base = values(to, field) if to else {}
        differences = [value - base.get(key, 0.0) for key, value in values(pruning, field).items()]
        sample = scale * np.array(differences)
        return plain(interval(float(sample.mean()), [[sample]], -most if to else 0.0, most))

    dense, baseline = Pruning(), prunings[0]
    return {dense: {"needles": mean(dense, "score")}} | {
        pruning: {
            "needles": mean(pruning, "score"),
            "needles_to_dense": mean(pruning, "score", dense),
            "kl": mean(pruning, "kl"),
            "kl_to_baseline": mean(pruning, "kl", baseline),
        }
        for pruning in prunings
    }


def plain(value: Interval) -> Plain:
    """The value for JSON, which has no NaN."""
    bounds = (value.value, value.low, value.high)
    return [None if math.isnan(bound) else round(bound, DIGITS) for bound in bounds]


def best(trials: Mapping[Pruning, Mapping[str, Any]]) -> Pruning:
    """The setting that finds most needles; of equal ones, that with the least divergence from dense."""
    prunings = [pruning for pruning in trials if pruning.stages]
    return max(prunings, key=lambda pruning: (trials[pruning]["needles"][0], -trials[pruning]["kl"][0]))
