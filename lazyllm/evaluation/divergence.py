"""Divergence of a setting's next-token distributions from dense's, with dense's answer teacher-forced."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lazyllm.evaluation.runner import Trial, changed_nothing, prepared
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.teacher_forcing import forced_in, greedy_answer, log_softmax
from lazyllm.llm import LLM
from lazyllm.support import checked

TOKENS = 16
IN_PLAY = 0  # the first column of Session.last_pass


def kl_divergence(logits: np.ndarray, others: np.ndarray) -> np.ndarray:
    """KL(softmax(logits) || softmax(others)) over the last axis, in nats, clipped at 0."""
    log_p, log_q = log_softmax(logits), log_softmax(others)
    divergence: np.ndarray = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return divergence.clip(min=0.0)


@dataclass(frozen=True)
class Reference:
    """Dense's greedy answer to an item."""

    answer: list[int]
    logits: np.ndarray  # (tokens, vocab)


class Divergence:
    """A measure of the runner: teacher-forces dense's greedy answer, of at most `tokens` tokens.

    The last item's answer is cached, since all settings run on an item in turn.
    """

    def __init__(self, tokens: int = TOKENS) -> None:
        self.tokens = checked.whole(tokens, "tokens", 1)
        self._item: Mapping[str, Any] | None = None
        self._reference: Reference | None = None

    def __call__(self, llm: LLM, tasks: Tasks, one: Trial) -> dict[str, Any]:
        reference = self._reference_of(llm, tasks, one)
        given = prepared(llm, tasks, one)
        session = llm.session(given.method)
        begun = time.perf_counter()
        passes = forced_in(session, given.prompt.ids, reference.answer)
        logits = [next(passes)]
        ttft = time.perf_counter() - begun
        counts = [session.last_pass]
        for one_more in passes:
            logits.append(one_more)
            counts.append(session.last_pass)
        seconds = time.perf_counter() - begun
        told = np.array(logits)
        return {
            "kl": float(kl_divergence(reference.logits, told).mean()),
            "agreement": float((reference.logits.argmax(axis=1) == told.argmax(axis=1)).mean()),
            "prompt_tokens": given.n_whole,
            "cut": given.prompt.cut,
            "wrapper": given.prompt.wrapper,
            "forced_tokens": len(reference.answer),
            "flops": given.method.prefill_flops(llm.config, len(given.prompt.ids), counts[0]),
            "computed": round(session.computed * given.share, 6),
            "reached_top": round(session.reached_top * given.share, 6),
            "changed_nothing": changed_nothing(one.method, given, np.array(counts)[:, :, IN_PLAY]),
            "timing": {
                "ttft": ttft + given.compressing,
                "seconds": seconds + given.compressing,
                "compressing": given.compressing,
            },
        }

    def _reference_of(self, llm: LLM, tasks: Tasks, one: Trial) -> Reference:
        if self._reference is None or self._item is not one.item:
            prompt = tasks.prompt(llm, one.task, one.item)
            stops = tasks.stops(llm, one.task)
            ends = {*llm.eos_token_ids, *stops.ids}
            answer, logits = greedy_answer(llm.session(), prompt.ids, self.tokens, ends, stops.never_first)
            self._reference, self._item = Reference(answer, logits), one.item
        return self._reference
