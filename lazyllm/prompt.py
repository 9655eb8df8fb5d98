"""Prompts: text, token ids or chat messages, encoded as the token ids that are appended to a context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from lazyllm.model import Model
from lazyllm.support import checked

PromptIds = Sequence[int] | np.ndarray
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Prompt = str | PromptIds | Messages

EMPTY = "the prompt is empty; it must have at least one token"
KINDS = "text, token ids or a list of messages"
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids. `n_given` counts the tokens before compression, which took `compress_seconds`."""

    ids: list[int]
    n_given: int
    tokenize_seconds: float
    compress_seconds: float = 0.0


def is_messages(prompt: Any) -> bool:
    """True for a chat: a list of dicts."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_batch(prompt: Any) -> bool:
    """True for a list of prompts, an empty one too; a list of whole numbers or of messages is one prompt."""
    if isinstance(prompt, str) or (isinstance(prompt, np.ndarray) and prompt.ndim == 1):
        return False
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
        raise TypeError(f"a prompt must be {KINDS}, or a list of those, not {type(prompt).__name__}")
    return len(prompt) == 0 or isinstance(prompt[0], str | Sequence | np.ndarray)


def checked_ids(ids: Any, vocab: int) -> list[int]:
    """Token ids as a list of int, each within the vocabulary."""
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of unequal length
        raise TypeError("token ids must be one list of whole numbers") from None
    if array.ndim != 1:
        raise TypeError(f"token ids must be one list of whole numbers, not {array.ndim} dimensions")
    if array.size == 0:
        raise ValueError(EMPTY)
    if array.dtype.kind not in "iu":
        raise TypeError(f"token ids must be whole numbers, not {array.dtype.name}")
    wrong = np.flatnonzero((array < 0) | (array >= vocab))
    if wrong.size:
        raise ValueError(f"token id {array[wrong[0]]} at index {wrong[0]} is not from 0 to {vocab - 1}")
    return [int(token) for token in array]


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


class PromptPlace(NamedTuple):
    """A prompt in the context: its first position, its tokens there, and those given with removed ones."""

    begins: int
    n_run: int
    n_given: int

    @classmethod
    def checked(cls, value: Any) -> PromptPlace:
        """From a file."""
        begins, n_run, n_given = value
        return cls(
            checked.whole(begins, "a prompt's begin", 0),
            checked.whole(n_run, "the tokens of a prompt", 1),
            checked.whole(n_given, "the given tokens of a prompt", 1),
        )

    def cut(self, length: int) -> PromptPlace:
        """The part of the prompt within this length; of the removed tokens the same share counts."""
        n_run = min(self.n_run, max(0, length - self.begins))
        return PromptPlace(self.begins, n_run, round(self.n_given * n_run / self.n_run))


@dataclass(frozen=True)
class Turn:
    """Messages and the answer to them, with the positions of their first token and of the answer's."""

    begins: int
    answer_begins: int
    messages: list[dict[str, Any]]
    text: str
    cut: bool = False  # the context was truncated within the messages
    tools: tuple[Mapping[str, Any], ...] = ()  # of the chat

    @classmethod
    def checked(cls, values: Any) -> Turn:
        """From a file."""
        turn = cls(**{**values, "tools": tuple(values.get("tools", ()))})
        checked.whole(turn.begins, "a turn's begin", 0)
        checked.whole(turn.answer_begins, "the begin of a turn's answer", 0)
        is_turn = isinstance(turn.text, str) and isinstance(turn.cut, bool)
        if not (is_turn and isinstance(turn.messages, list) and turn.messages):
            raise TypeError(f"a turn is {values!r:.80}")
        checked_messages(turn.messages)
        if not all(isinstance(tool, dict) for tool in turn.tools):
            raise TypeError(f"a turn's tools are {turn.tools!r:.80}")
        return turn


class Conversation:
    """The chat messages of one context so far; encodes the prompts that continue it."""

    def __init__(self, model: Model, turns: Sequence[Turn] = ()) -> None:
        self._model = model
        self.turns = tuple(turns)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Those of all turns, with the answers."""
        return [
            message
            for turn in self.turns
            for message in (*turn.messages, {"role": "assistant", "content": turn.text})
        ]

    def encode(
        self, prompt: Prompt, chat: bool, length: int, ended_by: int | None, tools: Tools = ()
    ) -> list[int]:
        """The ids to append to a context of this length for a prompt.

        `ended_by`: the end token of the last answer, which is in the context. `tools` are those of the whole
        chat, which its first prompt names.
        """
        if tools and not chat:
            raise ValueError("tools are described by a chat template: they need chat=True")
        if not isinstance(prompt, str | Sequence | np.ndarray) or isinstance(prompt, bytes):
            raise TypeError(f"a prompt must be {KINDS}, not {prompt!r:.80}")
        if not isinstance(prompt, str) and len(prompt) == 0:
            raise ValueError(EMPTY)
        if chat:
            text, special = self._rendered(self._messages(prompt), ended_by, self._tools(tools)), False
        elif isinstance(prompt, str):
            text, special = prompt, length == 0
        elif is_messages(prompt):
            raise TypeError("a list of messages needs chat=True")
        else:
            return checked_ids(prompt, self._model.config.vocab)
        return checked_ids(self._model.tokenizer.encode(text, add_special=special), self._model.config.vocab)

    def answered(self, begins: int, answer_begins: int, prompt: Prompt, text: str, tools: Tools = ()) -> None:
        """Adds a turn to the chat, or replaces the last one if it began there: its answer has gone on."""
        self.truncate(begins)
        turn = Turn(begins, answer_begins, self._messages(prompt), text, tools=tuple(self._tools(tools)))
        self.turns += (turn,)

    def _tools(self, new: Tools) -> Tools:
        tools = self.turns[-1].tools if self.turns else new
        if new and list(new) != list(tools):
            raise ValueError("tools are those of the whole chat: other ones than its first prompt had")
        return tools

    def truncate(self, length: int) -> None:
        """Drops the turns that begin at this position or behind it, and marks one that it cuts."""
        self.turns = tuple(
            replace(turn, cut=turn.cut or length < turn.answer_begins)
            for turn in self.turns
            if turn.begins < length
        )

    @staticmethod
    def _messages(prompt: Prompt) -> list[dict[str, Any]]:
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if is_messages(prompt):
            return checked_messages(prompt)  # type: ignore[arg-type]
        raise TypeError("chat=True needs text or a list of messages, not token ids")

    def _rendered(self, new: list[dict[str, Any]], ended_by: int | None, tools: Tools) -> str:
        """The text that the template renders for new messages after the chat so far.

        The last answer, which is in the context already, is rendered as a mark; the turn's text follows it.
        """
        tokenizer = self._model.tokenizer
        if not self.turns:
            return tokenizer.chat_text(new, tools=tools)
        last = self.turns[-1]
        if last.cut:
            raise ValueError(
                "the context was truncated within the messages of the chat's last turn; "
                f"truncate it to {last.begins}, where that turn begins, to go on with the chat"
            )
        mark = uuid4().hex  # in no message, whatever they say
        chat = [*self.messages[:-1], {"role": "assistant", "content": mark}, *new]
        _, marked, tail = tokenizer.chat_text(chat, tools=tools).rpartition(mark)
        if not marked:
            raise ValueError(
                "the chat template leaves earlier answers out, so a follow-up cannot extend its chat"
            )
        if ended_by is None:
            return tail
        return tail.removeprefix(tokenizer.decode([ended_by], skip_special_tokens=False))
