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
from lazyllm.evaluation.summary import DENSE, Row
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Trial, scored_answer
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning

DIGITS = 6
Plain = list[float | None]
"""Value, low and high of an interval; None for a bound that is not known."""


class Tried:
    """A measure of the runner: the divergence from dense, and the score where the prompt hides needles."""

    def __init__(self, tokens: int) -> None:
        self._divergence = Divergence(tokens)

    def __call__(self, llm: LLM, tasks: Tasks, one: Trial) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if one.key.setting != DENSE:
            made |= self._divergence(llm, tasks, one)
        if one.key.dataset != OWN:
            made |= scored_answer(llm, tasks, one)
        return made


def results(rows: Sequence[Row], several: Sequence[Pruning]) -> dict[Pruning, dict[str, Any]]:
    """By setting, dense and `several`, each as value, low and high of a 95 % interval: `needles` found, in
    percent, and `needles_to_dense`, the difference to dense's; `kl` from dense, and `kl_to_baseline`, the
    difference to that of the first of `several`. Differences are of the same prompts.

    Prompts are one sample: with a few of each kind, all found or none, the kinds by themselves would vary too
    little.
    """

    def values(one: Pruning, field: str) -> dict[tuple[str, str], float]:
        mine = [row for row in rows if row["setting"] == label_of(one) and field in row]
        return {(row["dataset"], row["item"]): row[field] for row in mine}

    def mean(one: Pruning, field: str, to: Pruning | None = None) -> Plain:
        scale, most = (100.0, 100.0) if field == "score" else (1.0, math.inf)
        base = values(to, field) if to else {}
        sample = np.array([scale * (value - base.get(key, 0.0)) for key, value in values(one, field).items()])
        return plain(interval(float(sample.mean()), [[sample]], -most if to else 0.0, most))

    dense, baseline = Pruning(), several[0]
    made: dict[Pruning, dict[str, Any]] = {dense: {"needles": mean(dense, "score")}}
    for one in several:
        made[one] = {
            "needles": mean(one, "score"),
            "needles_to_dense": mean(one, "score", dense),
            "kl": mean(one, "kl"),
            "kl_to_baseline": mean(one, "kl", baseline),
        }
    return made


def plain(value: Interval) -> Plain:
    """The value for JSON, which has no NaN."""
    return [None if math.isnan(one) else round(one, DIGITS) for one in (value.value, value.low, value.high)]


def best(made: Mapping[Pruning, Mapping[str, Any]]) -> Pruning:
    """The setting that finds most needles; of equal ones, that with the least divergence from dense."""
    pruned = [one for one in made if one.stages]
    return max(pruned, key=lambda one: (made[one]["needles"][0], -made[one]["kl"][0]))
