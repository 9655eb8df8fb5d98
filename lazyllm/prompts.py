"""Prompts: what the user may give, turned into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lazyllm.llm import LLM

PromptIds = Sequence[int] | np.ndarray
Prompt = str | PromptIds


@dataclass(frozen=True)
class Given:
    """A prompt, encoded. Compressing its text, if that is the method, took `compress_seconds` and left `ids`
    of `n_given` tokens."""

    ids: list[int]
    n_given: int
    tokenize_seconds: float
    compress_seconds: float = 0.0


def is_batch(prompt: Any) -> bool:
    """Whether this is a list of prompts; a list of whole numbers is one prompt."""
    if isinstance(prompt, str) or (isinstance(prompt, np.ndarray) and prompt.ndim == 1):
        return False
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
        raise TypeError(f"a prompt must be text, token ids or a list of those, not {type(prompt).__name__}")
    return len(prompt) > 0 and isinstance(prompt[0], str | Sequence | np.ndarray)


def checked_ids(ids: Any, vocab: int) -> list[int]:
    """Token ids as a list of int, each within the vocabulary."""
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of unequal length
        raise TypeError("token ids must be one list of whole numbers") from None
    if array.ndim != 1:
        raise TypeError(f"token ids must be one list of whole numbers, not {array.ndim} dimensions")
    if array.size == 0:
        raise ValueError("the prompt is empty; it must have at least one token")
    if array.dtype.kind not in "iu":
        raise TypeError(f"token ids must be whole numbers, not {array.dtype.name}")
    wrong = np.flatnonzero((array < 0) | (array >= vocab))
    if wrong.size:
        raise ValueError(f"token id {array[wrong[0]]} at index {wrong[0]} is not from 0 to {vocab - 1}")
    return [int(token) for token in array]


def encoded(prompt: Prompt, llm: LLM, chat: bool) -> list[int]:
    """The ids of a prompt; text with chat=True becomes the user's turn of the checkpoint's chat template."""
    if isinstance(prompt, str):
        if chat:
            prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        else:
            prompt = llm.tokenizer.encode(prompt)
    elif chat:
        raise TypeError("chat=True needs a prompt of text, not of token ids")
    return checked_ids(prompt, llm.config.vocab)
