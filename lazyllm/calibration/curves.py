"""Curves: how much of what dense later attends to survives a stage, by the stage's layer and its keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.evaluation.divergence import TOKENS
from lazyllm.evaluation.runner import Trial
from lazyllm.evaluation.tasks import Tasks
from lazyllm.generation import Generation
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning, seeing_layers

KEEPS = tuple(np.geomspace(1.0, 0.02, 25)[1:].round(4).tolist())
DIGITS = 4
Lost = list[list[list[float]]]


def stage_layers(config: ModelConfig) -> list[int]:
    """The layers that a stage may follow. Each has a layer above it whose attention a trace shows."""
    return seeing_layers(config, config.n_layers - 3)


def lost_shares(llm: LLM, tasks: Tasks, one: Trial) -> dict[str, Any]:
    """A measure of the runner: `lost_by_stage` of the item's prompt."""
    ids = tasks.prompt(llm, one.task, one.item).ids
    return {"prompt_tokens": len(ids), "lost": lost_by_stage(llm, ids)}


def lost_by_stage(llm: LLM, ids: Sequence[int]) -> Lost:
    """For each layer of `stage_layers` and each of KEEPS, the share lost of the attention of each layer
    above, except the last one, whose attention no trace has."""
    options = Pruning().recommended()
    stages = stage_layers(llm.config)
    attention = attention_of_answer(llm, ids)
    scores = stage_scores(llm, ids, stages, options)
    always = always_kept(options, len(ids))
    return [
        np.round(1 - surviving(mine, attention[layer + 1 :], always, KEEPS), DIGITS).tolist()
        for layer, mine in zip(stages, scores, strict=True)
    ]


def stage_scores(llm: LLM, ids: Sequence[int], layers: Sequence[int], options: Pruning) -> np.ndarray:
    """The scores (layers, prompt tokens) of stages after these layers, in a prefill that drops nothing."""
    stages = traced(llm, ids, layers, options, max_new_tokens=1).trace.stages
    return np.array([stage.scores for stage in stages], np.float64)


def attention_of_answer(llm: LLM, ids: Sequence[int]) -> np.ndarray:
    """Attention (layers but the last, prompt tokens) of the queries that give dense's greedy answer: mean
    over heads and over up to TOKENS tokens."""
    layers = range(llm.config.n_layers - 1)
    passes = traced(llm, ids, layers, Pruning(), TOKENS).trace.passes
    rows = [[stage.scores[: len(ids)] for stage in one.stages] for one in passes]
    mean: np.ndarray = np.mean(np.array(rows, np.float64), axis=0)
    return mean


def traced(
    llm: LLM, ids: Sequence[int], layers: Sequence[int], options: Pruning, max_new_tokens: int
) -> Generation:
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
    n = len(scores)
    best_first = np.lexsort((-scores, ~always))  # stable: of equal scores the smaller position wins
    held = np.where(always, 0, attention)[:, best_first].cumsum(axis=1)
    n_kept = [max(math.ceil(keep * n), int(always.sum())) for keep in keeps]
    whole = held[:, -1]
    shares = np.ones((len(keeps), len(whole)))
    np.divide(held[:, np.array(n_kept) - 1].T, whole, out=shares, where=whole > 0)
    return shares
