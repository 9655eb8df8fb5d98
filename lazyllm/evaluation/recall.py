"""Recall: the share of the attention of dense's answer that goes to tokens which a setting has kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from lazyllm.evaluation.divergence import TOKENS
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Trial, prepared
from lazyllm.generation import Request
from lazyllm.llm import LLM
from lazyllm.method import MANY, Method
from lazyllm.pruning import RECOMMENDED_SINK, Drop, Pruning
from lazyllm.support import checked


class Recall:
    """A measure of the runner, by the attention of dense's greedy answer of at most `tokens` tokens.

    The attention to the last item's prompt is cached, since all settings run on an item in turn.
    """

    def __init__(self, tokens: int = TOKENS) -> None:
        self.tokens = checked.whole(tokens, "tokens", 1)
        self._last: tuple[Mapping[str, Any], np.ndarray] | None = None

    def __call__(self, llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
        if self._last is None or self._last[0] is not trial.item:
            self._last = trial.item, self._attention(llm, tasks, trial)
        attention = self._last[1]
        ready = prepared(llm, tasks, trial)
        session = llm.session(ready.method)
        started = time.perf_counter()
        session.forward(ready.prompt.ids, progress=False)
        seconds = time.perf_counter() - started
        layers = np.arange(len(attention))[:, None]
        held = (session.depths > layers) & (session.core.gone == 0)  # (L, n)
        total, kept = attention.sum(axis=1), (attention * held).sum(axis=1)
        by_layer = np.divide(kept, total, out=np.ones_like(total), where=total > 0)
        return {
            "recall": float(by_layer.mean()),
            "recall_by_layer": by_layer.round(6).tolist(),
            **ready.row(llm, trial, session.last_pass[None], session, (seconds, seconds)),
            "changed_nothing": trial.method != Pruning() and bool(held.all()),
        }

    def _attention(self, llm: LLM, tasks: Tasks, trial: Trial) -> np.ndarray:
        """The attention (L, n) of dense's answer to the prompt, in every layer: the mean over heads and over
        the passes that chose a token. The first tokens and the last one count as 0."""
        last = llm.config.n_layers - 1
        keeps_all = Pruning({**dict.fromkeys(range(last), 1.0), last: Drop(1.0)})  # dense, with scores
        stops = tasks.stops(llm, trial.key.dataset)
        request = Request(
            max_new_tokens=self.tokens,
            trace=True,
            progress=False,
            stop_token_ids=frozenset(stops.ids),
            never_first=frozenset(stops.never_first),
        )
        ids = tasks.prompt(llm, trial.key.dataset, trial.item).ids
        passes = llm.session(keeps_all).answer(ids, request).finished().trace.passes
        scores = [[layer["scores"][: len(ids)] for layer in each.runs] for each in passes]
        attention = np.asarray(np.mean(scores, axis=0, dtype=np.float64))
        attention[:, :RECOMMENDED_SINK] = attention[:, -1] = 0.0
        return attention


def check_positions(settings: Mapping[str, Method]) -> None:
    """Raises ValueError for a method that shortens prompts: its tokens have other positions than dense's."""
    for label, method in settings.items():
        if method.compresses or method.kept(MANY) + method.gaps(MANY, 0).size < MANY:
            raise ValueError(f"recall is by position, and {label} moves tokens to other positions")
