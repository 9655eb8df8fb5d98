"""The divergence of next-token distributions, measured on dense's answer."""

import time
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.trial import Trial, prepared
from lazyllm.generation import Pass
from lazyllm.llm import LLM
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


class Divergence:
    """A measure of the runner: the divergence of the distributions before each token of dense's greedy answer
    of at most `tokens` tokens, which is teacher-forced.

    The answer to the last item is kept, since all settings run on an item in turn.
    """

    def __init__(self, tokens: int = TOKENS) -> None:
        self.tokens = checked.whole(tokens, "tokens", 1)
        self._last: tuple[Mapping[str, Any], DenseAnswer] | None = None

    def __call__(self, llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
        if self._last is None or self._last[0] is not trial.item:
            ids = tasks.prompt(llm, trial.key.dataset, trial.item).ids
            request = tasks.request(llm, trial.key.dataset)
            ends = {*llm.eos_token_ids, *request.stop_token_ids}
            self._last = trial.item, greedy_answer(llm.session(), ids, self.tokens, ends, request.never_first)
        dense = self._last[1]
        ready = prepared(llm, tasks, trial)
        session = llm.session(ready.method)
        rows: list[np.ndarray] = []
        passes: list[Pass] = []
        times = [time.perf_counter()]
        for row in forced_logits(session, ready.prompt.ids, dense.tokens):
            times.append(time.perf_counter())
            rows.append(row)
            passes.append(Pass.last_of(session.core, len(passes)))
        seconds, dropped = (times[1] - times[0], times[-1] - times[0]), any(item.dropped for item in passes)
        logits = np.array(rows)
        by_token = kl_divergence(dense.logits, logits)
        return {
            "kl": float(by_token.mean()),
            "kl_by_token": [round(float(value), 6) for value in by_token],
            "agreement": float((dense.logits.argmax(axis=1) == logits.argmax(axis=1)).mean()),
            "forced_tokens": len(dense.tokens),
            **ready.row(llm, trial, passes[0].counts, session, seconds, dropped),
        }
