"""Attention of the last prompt token in each layer, as in the paper's Figure 2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Trial
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning

MASSES = (0.5, 0.9, 0.99)
QUANTILES = tuple(range(0, 101, 2))  # percent


def attention_of(llm: LLM, tasks: Tasks, one: Trial) -> dict[str, Any]:
    """A measure of the runner: attention of the prompt's last token."""
    return attention_scores(llm, tasks.prompt(llm, one.task, one.item).ids)


def attention_scores(llm: LLM, ids: Sequence[int]) -> dict[str, Any]:
    """For each layer except the top one, whose scores no stage computes: quantiles of the scores, as
    multiples of a uniform share, and the smallest share of the prompt that holds each of MASSES of the
    attention. Also quantiles of the tokens' mean over these layers."""
    every_layer = Pruning(dict.fromkeys(range(llm.config.n_layers - 1), 1.0))
    made = llm.generate(list(ids), pruning=every_layer, max_new_tokens=1, trace=True, progress=False)
    scores = [stage.scores for stage in made.trace.stages]

    def quantiles(one: np.ndarray) -> list[float]:
        return [round(float(q), 5) for q in np.percentile(one * len(ids), QUANTILES)]

    return {
        "prompt_tokens": len(ids),
        "quantiles": [quantiles(one) for one in scores],
        "quantiles_of_means": quantiles(np.mean(scores, axis=0)),
        "holds": [[round(share_that_holds(one, mass), 5) for mass in MASSES] for one in scores],
    }


def share_that_holds(scores: np.ndarray, mass: float) -> float:
    """The smallest share of the tokens that holds the share `mass` of all scores."""
    falling = np.sort(scores.astype(np.float64))[::-1].cumsum()
    needed: int = np.searchsorted(falling, mass * falling[-1] * (1 - 1e-12)) + 1
    return needed / len(scores)


def mean_over(rows: Iterable[Mapping[str, Any]], field: str) -> np.ndarray:
    """The mean over items, by layer where the field is."""
    mean: np.ndarray = np.mean([row[field] for row in rows], axis=0)
    return mean
