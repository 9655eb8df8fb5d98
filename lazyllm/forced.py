"""Teacher forcing: what the model makes of an answer that it is given; and the answer that is its own."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.methods import Method

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.session import Session


def forced_logits(
    llm: LLM, prompt_ids: Sequence[int], answer_ids: Sequence[int], pruning: Method | None = None
) -> Iterator[np.ndarray]:
    """(vocab,) logits before each token of the answer; the answer is fed as if the model had said it."""
    return forced_in(llm.session(pruning), prompt_ids, answer_ids)


def forced_in(session: Session, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """As `forced_logits`, in a session that can be looked at between two tokens."""
    yield session.forward(prompt_ids, progress=False)
    for token in answer_ids[:-1]:
        yield session.forward([token], generated=True)


def greedy_answer(
    session: Session,
    prompt_ids: Sequence[int],
    most: int,
    ends: Container[int],
    stop_ids: Container[int] = frozenset(),
) -> tuple[list[int], np.ndarray]:
    """Up to `most` likeliest tokens and the logits (tokens, vocab) before each.

    It ends with one of `ends`, or of `stop_ids`, which are no end as the first token.
    """
    logits = [session.forward(prompt_ids, progress=False)]
    answer = [int(logits[0].argmax())]
    while len(answer) < most and answer[-1] not in ends:
        if len(answer) > 1 and answer[-1] in stop_ids:
            break
        logits.append(session.forward(answer[-1:], generated=True))
        answer.append(int(logits[-1].argmax()))
    return answer, np.array(logits)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in double precision."""
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    normed: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normed
