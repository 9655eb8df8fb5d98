"""Curves: how much of what dense later attends to survives a stage, by the stage's layer and its keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.evaluation.divergence import TOKENS
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Trial
from lazyllm.generation import Generation
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning, seeing_layers

KEEPS = tuple(np.geomspace(1.0, 0.02, 25)[1:].round(4).tolist())
DIGITS = 4
Lost = list[list[list[float]]]


def stage_layers(config: ModelConfig) -> list[int]:
    """The layers that a stage may follow. Each has a layer above it whose attention a trace shows."""
    return seeing_layers(config, config.n_layers - 3)


def lost_shares(llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
    """A measure of the runner: `lost_by_stage` of the item's prompt."""
    ids = tasks.prompt(llm, trial.task, trial.item).ids
    return {"prompt_tokens": len(ids), "lost": lost_by_stage(llm, ids)}


def lost_by_stage(llm: LLM, ids: Sequence[int]) -> Lost:
    """By layer of `stage_layers`, by keep of KEEPS and by layer above it: the share of attention lost.

    The attention is that of the tokens that give dense's greedy answer, mean over heads and over up to TOKENS
    tokens. The last layer is left out, as no trace has its attention.
    """
    options, stages, n = Pruning().recommended(), stage_layers(llm.config), len(ids)
    (prefill,) = traced(llm, ids, stages, options, max_new_tokens=1).trace.passes
    passes = traced(llm, ids, range(llm.config.n_layers - 1), Pruning(), TOKENS).trace.passes
    rows = [[layer.scores[:n] for layer in one_pass.stages] for one_pass in passes]
    attention = np.mean(np.array(rows, np.float64), axis=0)
    always = always_kept(options, n)
    lost = []
    for layer, stage in zip(stages, prefill.stages, strict=True):
        kept = surviving(stage.scores.astype(np.float64), attention[layer + 1 :], always, KEEPS)
        lost.append(np.round(1 - kept, DIGITS).tolist())
    return lost


def traced(
    llm: LLM, ids: Sequence[int], layers: Sequence[int], options: Pruning, max_new_tokens: int
) -> Generation:
    """An answer with the scores of stages after these layers, which drop nothing."""
    stages = replace(options, stages=tuple((layer, 1.0) for layer in layers))
    return llm.generate(list(ids), pruning=stages, max_new_tokens=max_new_tokens, trace=True, progress=False)


def always_kept(options: Pruning, n_prompt: int) -> np.ndarray:
    """True for the prompt tokens that every stage keeps: the first ones (sink) and the query token."""
    kept = np.zeros(n_prompt, bool)
    kept[: options.sink] = kept[-1] = True
    return kept


def surviving(
    scores: np.ndarray, attention: np.ndarray, always: np.ndarray, keeps: Sequence[float]
) -> np.ndarray:
    """The share (keeps, layers) of each layer's attention that lies on the tokens kept by each keep.

    `attention` is (layers, tokens). What is on the tokens that are `always` kept does not count; a layer
    without any other attention loses nothing.
    """
    best_first = np.lexsort((-scores, ~always))  # stable: of equal scores the smaller position wins
    held = np.where(always, 0, attention)[:, best_first].cumsum(axis=1)
    n_kept = [max(math.ceil(keep * len(scores)), int(always.sum())) for keep in keeps]
    total = held[:, -1]
    shares = np.ones((len(keeps), len(total)))
    np.divide(held[:, np.array(n_kept) - 1].T, total, out=shares, where=total > 0)
    return shares
