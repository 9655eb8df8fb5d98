"""Measures against dense's answer: divergence of next-token distributions, recall of the attention."""

import time
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Trial, prepared
from lazyllm.generation import Pass, Request
from lazyllm.llm import LLM
from lazyllm.method import MANY, Method
from lazyllm.pruning import RECOMMENDED_SINK, Drop, Pruning
from lazyllm.sampling import log_softmax
from lazyllm.session import Session
from lazyllm.support import checked

TOKENS = 16


class DenseAnswer(NamedTuple):
    """The tokens of a greedy answer, and the logits (tokens, vocab) before each."""

    tokens: list[int]
    logits: np.ndarray


def forced_logits(session: Session, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """The logits (vocab,) before each token of the answer, whose tokens are run as generated ones."""
    yield session.forward(prompt_ids, progress=False)
    for token in answer_ids[:-1]:
        yield session.forward([token], generated=True)


def greedy_answer(
    session: Session,
    prompt_ids: Sequence[int],
    max_tokens: int,
    ends: Container[int],
    never_first: Collection[int] = (),
) -> DenseAnswer:
    """Greedy decoding of up to `max_tokens` tokens.

    Ends after a token of `ends`. The first token is none of `never_first`, whose logits stay as they are.
    """
    logits = [session.forward(prompt_ids, progress=False)]
    allowed = logits[0].copy()
    allowed[list(never_first)] = -np.inf
    answer = [int(allowed.argmax())]
    while len(answer) < max_tokens and answer[-1] not in ends:
        logits.append(session.forward(answer[-1:], generated=True))
        answer.append(int(logits[-1].argmax()))
    return DenseAnswer(answer, np.array(logits))


def kl_divergence(logits: np.ndarray, others: np.ndarray) -> np.ndarray:
    """KL(softmax(logits) || softmax(others)) over the last axis, in nats, clipped at 0."""
    log_p, log_q = log_softmax(logits), log_softmax(others)
    divergence: np.ndarray = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return divergence.clip(min=0.0)


class AgainstDense:
    """A measure of the runner, by dense's greedy answer of at most `tokens` tokens.

    What it needs of dense for the last item is cached, since all settings run on an item in turn.
    """

    def __init__(self, tokens: int = TOKENS) -> None:
        self.tokens = checked.whole(tokens, "tokens", 1)
        self._last: tuple[Mapping[str, Any], Any] | None = None

    def reference(self, llm: LLM, tasks: Tasks, trial: Trial) -> Any:
        if self._last is None or self._last[0] is not trial.item:
            ids = tasks.prompt(llm, trial.key.dataset, trial.item).ids
            request = replace(tasks.request(llm, trial.key.dataset), max_new_tokens=self.tokens)
            self._last = trial.item, self.of_dense(llm, ids, request)
        return self._last[1]

    def of_dense(self, llm: LLM, ids: list[int], request: Request) -> Any:
        raise NotImplementedError


class Divergence(AgainstDense):
    """The divergence of the distributions before each token of dense's answer, which is teacher-forced."""

    def of_dense(self, llm: LLM, ids: list[int], request: Request) -> DenseAnswer:
        ends = {*llm.eos_token_ids, *request.stop_token_ids}
        return greedy_answer(llm.session(), ids, self.tokens, ends, request.never_first)

    def __call__(self, llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
        dense: DenseAnswer = self.reference(llm, tasks, trial)
        ready = prepared(llm, tasks, trial)
        session = llm.session(ready.method)
        rows: list[np.ndarray] = []
        passes: list[Pass] = []
        times = [time.perf_counter()]
        for row in forced_logits(session, ready.prompt.ids, dense.tokens):
            times.append(time.perf_counter())
            rows.append(row)
            passes.append(Pass.last_of(session.core, len(passes)))
        seconds, dropped = (times[1] - times[0], times[-1] - times[0]), any(each.dropped for each in passes)
        logits = np.array(rows)
        by_token = kl_divergence(dense.logits, logits)
        return {
            "kl": float(by_token.mean()),
            "kl_by_token": [round(float(value), 6) for value in by_token],
            "agreement": float((dense.logits.argmax(axis=1) == logits.argmax(axis=1)).mean()),
            "forced_tokens": len(dense.tokens),
            **ready.row(llm, trial, passes[0].counts, session, seconds, dropped),
        }


class Recall(AgainstDense):
    """The share of the attention of dense's answer that goes to tokens which a setting has kept."""

    def of_dense(self, llm: LLM, ids: list[int], request: Request) -> np.ndarray:
        """The attention (L, n) of dense's answer to the prompt, in every layer: the mean over heads and over
        the passes that chose a token. The first tokens and the last one count as 0."""
        last = llm.config.n_layers - 1
        keeps_all = Pruning({**dict.fromkeys(range(last), 1.0), last: Drop(1.0)})  # dense, with scores
        passes = llm.session(keeps_all).answer(ids, replace(request, trace=True)).finished().trace.passes
        scores = [[stage.scores[: len(ids)] for stage in each.stages] for each in passes]
        attention = np.asarray(np.mean(scores, axis=0, dtype=np.float64))
        attention[:, :RECOMMENDED_SINK] = attention[:, -1] = 0.0
        return attention

    def __call__(self, llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
        attention: np.ndarray = self.reference(llm, tasks, trial)
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
            **ready.row(llm, trial, session.last_pass, session, (seconds, seconds), not held.all()),
        }


def check_positions(settings: Mapping[str, Method]) -> None:
    """Raises ValueError for a method that shortens prompts: its tokens have other positions than dense's."""
    for label, method in settings.items():
        if method.compresses or method.kept(MANY) < MANY:
            raise ValueError(f"recall is by position, and {label} moves tokens to other positions")
