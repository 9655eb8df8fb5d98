"""Attention of the last prompt token, layer by layer: what the paper's Figure 2 shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lazyllm.llm import LLM
from lazyllm.longbench.runner import Asked
from lazyllm.longbench.tasks import Tasks
from lazyllm.pruning import Pruning

MASSES = (0.5, 0.9, 0.99)
QUANTILES = tuple(range(0, 101, 2))  # percent


def attention_of(llm: LLM, tasks: Tasks, one: Asked) -> dict[str, Any]:
    """The measure of a run: what its prompt's last token attends to."""
    return look(llm, tasks.prompt(llm, one.task, one.item).ids)


def look(llm: LLM, ids: Sequence[int]) -> dict[str, Any]:
    """By layer, the top one excepted: quantiles of the scores, as multiples of an even share, and how much of
    the prompt it takes to hold so much of the attention."""
    every_layer = Pruning(dict.fromkeys(range(llm.config.n_layers - 1), 1.0))
    made = llm.generate(list(ids), pruning=every_layer, max_new_tokens=1, trace=True, progress=False)
    if made.trace is None:
        raise RuntimeError("the prompt left no trace")
    scores = [stage.scores for stage in made.trace.stages]
    return {
        "prompt_tokens": len(ids),
        "quantiles": [
            [round(float(q), 5) for q in np.percentile(one * len(ids), QUANTILES)] for one in scores
        ],
        "holds": [[round(share_that_holds(one, mass), 5) for mass in MASSES] for one in scores],
    }


def share_that_holds(scores: np.ndarray, mass: float) -> float:
    """The least share of the tokens whose scores sum to `mass` of them all."""
    falling = np.sort(scores.astype(np.float64))[::-1].cumsum()
    needed: int = np.searchsorted(falling, mass * falling[-1] * (1 - 1e-12)) + 1
    return needed / len(scores)


def mean_over(rows: Iterable[Mapping[str, Any]], field: str) -> np.ndarray:
    """(layers, values): the mean over items."""
    mean: np.ndarray = np.mean([row[field] for row in rows], axis=0)
    return mean
