"""Attention of the last prompt token, layer by layer: what the paper's Figure 2 shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.llm import LLM
from lazyllm.longbench.conditions import conditions
from lazyllm.longbench.results import Key, RunFolder
from lazyllm.longbench.tasks import Tasks
from lazyllm.progress import bar
from lazyllm.pruning import Pruning

SETTING = "attention"
MASSES = (0.5, 0.9, 0.99)
QUANTILES = tuple(range(0, 101, 2))  # percent


def look_at_all(llm: LLM, tasks: Tasks, out: Path, progress: bool) -> list[dict[str, Any]]:
    """One row an item, in a folder that resumes as a run does."""
    plan = [(tasks.task(name), item) for name, rows in tasks.items.items() for item in rows]
    told = conditions(llm, [SETTING], tasks.items, tasks.conditions, progress)
    with RunFolder(out, told) as folder, bar(len(plan), "attention", "item", progress) as line:
        for task, item in plan:
            key = Key(SETTING, task.name, str(item["_id"]))
            if key not in folder.done:
                folder.append({**key._asdict(), **look(llm, tasks.prompt(llm, task, item).ids)})
            line.update()
        return folder.rows


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
