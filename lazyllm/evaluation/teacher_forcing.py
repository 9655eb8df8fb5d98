"""Teacher forcing: logits while the model is fed a given answer; and the greedy answer with its logits."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lazyllm.method import Method

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.session import Session


class DenseAnswer(NamedTuple):
    """The tokens of a greedy answer, and the logits (tokens, vocab) before each."""

    tokens: list[int]
    logits: np.ndarray


def forced_logits(
    llm: LLM, prompt_ids: Sequence[int], answer_ids: Sequence[int], pruning: Method | None = None
) -> Iterator[np.ndarray]:
    """The logits (vocab,) before each token of the answer, whose tokens are run as generated ones."""
    return forced_in(llm.session(pruning), prompt_ids, answer_ids)


def forced_in(session: Session, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """`forced_logits` in the caller's session, which may be inspected between two tokens."""
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


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in double precision."""
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    normed: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normed
