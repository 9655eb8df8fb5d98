"""Teacher forcing: what the model makes of an answer that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.methods import Method

if TYPE_CHECKING:
    from lazyllm.llm import LLM


def forced_logits(
    llm: LLM, prompt_ids: Sequence[int], answer_ids: Sequence[int], pruning: Method | None = None
) -> Iterator[np.ndarray]:
    """(vocab,) logits before each token of the answer; the answer is fed as if the model had said it."""
    session = llm.session(pruning)
    yield session.forward(prompt_ids)
    for token in answer_ids[:-1]:
        yield session.forward([token], generated=True)
