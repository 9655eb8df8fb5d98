"""Prompts: text, token ids or chat messages; their forms, their checks, and their places in a context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Ids = Sequence[int] | np.ndarray
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Prompt = str | Ids | Messages

KINDS = "text, token ids (one list of whole numbers) or a list of messages"
READ = 2  # of `Session.kinds`: prompt tokens read, with no pass since
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class EncodedPrompt:
    """A user's prompt and the ids that stand for it, which took `tokenize_seconds`; `in_chat` if it is a
    chat's turn. `n_given` counts the ids before compression, which took `compress_seconds`."""

    prompt: Prompt
    ids: list[int]
    n_given: int
    in_chat: bool
    tokenize_seconds: float
    compress_seconds: float


def is_messages(prompt: Any) -> bool:
    """True for a chat: a list of dicts."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_batch(prompt: Any) -> bool:
    """True for a list of prompts, an empty one too; a list of whole numbers or of messages is one prompt."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim > 1
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) == 0 or isinstance(prompt[0], str | Sequence | np.ndarray)


def checked_ids(ids: Any, vocab: int) -> list[int]:
    """Token ids as a list of int, each within the vocabulary."""
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of unequal length
        array = np.array(None)
    if array.ndim and array.size == 0:
        raise ValueError("the prompt is empty; it must have at least one token")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"a prompt must be {KINDS}, not {ids!r:.80}")
    wrong = np.flatnonzero((array < 0) | (array >= vocab))
    if wrong.size:
        raise ValueError(f"token id {array[wrong[0]]} at index {wrong[0]} is not from 0 to {vocab - 1}")
    return list(array.tolist())


def checked_messages(messages: Messages) -> list[dict[str, Any]]:
    """Chat messages, each with a role and a content; a content in parts becomes one text."""
    return [_checked_message(f"message {i}", message) for i, message in enumerate(messages)]


def _checked_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"{name} must be a dict with role and content, not {message!r}")
    calls = "tool_calls" in message  # an answer that calls tools may have no content
    for key in ("role", "content"):
        if key not in message and not (calls and key == "content"):
            raise ValueError(f"{name} has no {key!r}; it has {', '.join(map(repr, message))}")
    if message["role"] not in ROLES:
        raise ValueError(f"the role of {name} must be one of {', '.join(ROLES)}, not {message['role']!r}")
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "".join(_part_text(name, part) for part in content)}
    if not (isinstance(content, str) or calls):
        raise TypeError(f"the content of {name} must be text, not {content!r}")
    return dict(message)


def _part_text(name: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError(
        f'the content of {name} must be text or parts such as {{"type": "text", "text": "Hello"}}; '
        f"it has the part {part!r:.80}"
    )


@dataclass(frozen=True)
class Place:
    """A prompt in the context: its first position, the number of its tokens there, and that before a method
    removed some. A turn of a chat has its messages, the last of which is the answer, and the chat's tools."""

    begins: int
    n_run: int
    n_given: int
    messages: Sequence[dict[str, Any]] = ()
    tools: Tools = ()

    def until(self, length: int) -> Place:
        """The part of the prompt within this length of the context. A shorter part is no turn of a chat, and its
        `n_given` is less in proportion."""
        n_run = length - self.begins
        if n_run >= self.n_run:
            return self
        return Place(self.begins, n_run, round(self.n_given * n_run / self.n_run))


def as_messages(prompt: Prompt) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if is_messages(prompt):
        return checked_messages(prompt)  # type: ignore[arg-type]
    raise TypeError("chat=True needs text or a list of messages, not token ids")
