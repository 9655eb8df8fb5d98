"""Trials: the best schedules on prompts kept back, by needles found and by their divergence from dense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lazyllm.calibration.prompts import OWN
from lazyllm.evaluation.divergence import Divergence
from lazyllm.evaluation.intervals import Interval, interval
from lazyllm.evaluation.runner import Trial, label_of, scored_answer
from lazyllm.evaluation.summary import DENSE, Row, Summary
from lazyllm.evaluation.tasks import Tasks
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning

NEEDLES = "needles"
DIGITS = 6


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
    difference to that of the first of `several`. Differences are of the same prompts."""
    found = Summary([row for row in rows if "score" in row], lambda name: NEEDLES)
    kl = {
        one: {(row["dataset"], row["item"]): row["kl"] for row in rows if row["setting"] == label_of(one)}
        for one in several
    }
    made: dict[Pruning, dict[str, Any]] = {Pruning(): {"needles": plain(found.mean(DENSE))}}
    for one in several:
        difference = found.difference(label_of(one))
        assert difference is not None  # every prompt runs under every setting
        to_baseline = [value - kl[several[0]][prompt] for prompt, value in kl[one].items()]
        made[one] = {
            "needles": plain(found.mean(label_of(one))),
            "needles_to_dense": plain(difference),
            "kl": plain(mean_interval([*kl[one].values()], low=0.0)),
            "kl_to_baseline": plain(mean_interval(to_baseline)),
        }
    return made


def mean_interval(values: Sequence[float], low: float = -math.inf) -> Interval:
    sample = np.array(values, float)
    return interval(float(sample.mean()), [[sample]], low)


def plain(value: Interval) -> list[float | None]:
    """As JSON has it, which has no nan."""
    return [None if math.isnan(one) else round(one, DIGITS) for one in (value.value, value.low, value.high)]


def best(made: Mapping[Pruning, Mapping[str, Any]]) -> Pruning:
    """The setting that finds most needles; of equal ones, that with the least divergence from dense."""
    pruned = [one for one in made if one.stages]
    return max(pruned, key=lambda one: (made[one]["needles"][0], -made[one]["kl"][0]))
