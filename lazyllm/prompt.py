"""Prompts: text, token ids or chat messages, encoded as the token ids that are appended to a context."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np

from lazyllm import _core
from lazyllm.generation import Request, Tools
from lazyllm.method import Method
from lazyllm.model import Model

PromptIds = Sequence[int] | np.ndarray
Messages = Sequence[Mapping[str, Any]]
Prompt = str | PromptIds | Messages

EMPTY = "the prompt is empty; it must have at least one token"
KINDS = "text, token ids or a list of messages"
PLAIN = Request()
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
    if array.size == 0:
        raise ValueError(EMPTY)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"token ids must be one list of whole numbers, not {array.dtype.name} of shape {array.shape}"
        )
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
class PromptPlace:
    """A prompt in the context: its first position, its tokens there, and those given with removed ones. A
    turn of a chat has its messages and the text of the answer, and the chat's tools."""

    begins: int
    n_run: int
    n_given: int
    cut: bool = False  # the context was truncated within it
    messages: Sequence[dict[str, Any]] = ()
    text: str = ""
    tools: Tools = ()

    def until(self, length: int) -> PromptPlace:
        """The part of the prompt within this length; of the removed tokens the same share counts."""
        n_run = min(self.n_run, length - self.begins)
        n_given = round(self.n_given * n_run / self.n_run)
        return replace(self, n_run=n_run, n_given=n_given, cut=self.cut or n_run < self.n_run)


@dataclass
class Conversation:
    """The prompts of one context, `core`, so far; encodes those that continue it."""

    model: Model
    method: Method
    prompts: tuple[PromptPlace, ...] = ()

    def truncate(self, length: int) -> None:
        """Drops prompts that begin at this position or behind it, and cuts one that reaches beyond it."""
        self.prompts = tuple(place.until(length) for place in self.prompts if place.begins < length)

    def answered(self, begins: int, answer_begins: int, prompt: Prompt, text: str, tools: Tools) -> None:
        """Makes a turn of what has been run since `begins`, or renews it: its answer has gone on."""
        earlier = tuple(place for place in self.prompts if place.begins < begins)
        n_given = sum(place.n_given for place in self.prompts[len(earlier) :])
        messages, tools = _messages(prompt), self._tools(tools)
        turn = PromptPlace(begins, answer_begins - begins, n_given, False, messages, text, tools)
        self.prompts = (*earlier, turn)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of all turns, with the answers."""
        return [
            message
            for turn in self.prompts
            if turn.messages
            for message in (*turn.messages, {"role": "assistant", "content": turn.text})
        ]

    def compressed(self, core: _core.Session, whole: EncodedPrompt, request: Request) -> EncodedPrompt:
        """The method's shorter form of a text, or of the users' messages in a chat."""
        start, prompt = time.perf_counter(), whole.prompt
        if isinstance(prompt, str):
            short: Prompt = self.method.compress(self.model, prompt)
        else:
            short = checked_messages(prompt)  # type: ignore[arg-type]
            for message in short:
                if message["role"] == "user":
                    message["content"] = self.method.compress(self.model, message["content"])
        seconds = time.perf_counter() - start
        encoded = self.encode(core, short, request)
        return replace(encoded, prompt=prompt, n_given=whole.n_given, compress_seconds=seconds)

    def encode(self, core: _core.Session, prompt: Prompt, request: Request = PLAIN) -> EncodedPrompt:
        """A prompt that is to be appended to the context; tools are those that a chat's first prompt has."""
        start = time.perf_counter()
        chat = request.chat or is_messages(prompt)
        if (request.tools or request.chat_template_kwargs) and not chat:
            raise ValueError("tools and chat_template_kwargs are for a chat template: they need chat=True")
        if not isinstance(prompt, str | Sequence | np.ndarray) or isinstance(prompt, bytes):
            raise TypeError(f"a prompt must be {KINDS}, not {prompt!r:.80}")
        if not isinstance(prompt, str) and len(prompt) == 0:
            raise ValueError(EMPTY)
        ids: Any = self._rendered(core, _messages(prompt), request) if chat else prompt
        if isinstance(ids, str):
            ids = self.model.tokenizer.encode(ids, add_special=core.length == 0 and not chat)
        else:
            self.check_ids_allowed()
        checked = checked_ids(ids, self.model.config.vocab)
        return EncodedPrompt(prompt, checked, len(checked), chat, time.perf_counter() - start)

    def check_ids_allowed(self) -> None:
        if self.method.compresses:
            raise TypeError(
                f"{type(self.method).__name__} needs a prompt of text or messages, not of token ids"
            )

    def repeats(self, core: _core.Session, encoded: EncodedPrompt) -> bool:
        """True if a prompt begins with all text or messages of the context."""
        prompt, ids = encoded.prompt, encoded.ids
        if is_messages(prompt):
            earlier = self.messages
            return bool(earlier) and list(prompt[: len(earlier)]) == earlier
        if 2 * len(ids) < core.length:
            return False
        if isinstance(prompt, str):  # whose ids may differ where the context ends
            text = self.model.tokenizer.decode(core.ids.tolist())
            return bool(text) and self.model.tokenizer.decode(ids).startswith(text)
        return core.length > 0 and ids[: core.length] == core.ids.tolist()

    def _tools(self, new: Tools) -> Tools:
        tools = self.prompts[0].tools if self.messages else new
        if new and list(new) != list(tools):
            raise ValueError("tools are those of the whole chat: other ones than its first prompt had")
        return tools

    def _rendered(self, core: _core.Session, new: list[dict[str, Any]], request: Request) -> str:
        """The text that the template renders for new messages after the chat so far: what follows a
        mark that stands for the last answer, which is in the context already."""
        self._check_turn(core.length)
        tokenizer = self.model.tokenizer
        tools, variables = self._tools(request.tools), request.chat_template_kwargs

        def render(messages: list[dict[str, Any]]) -> str:
            return tokenizer.chat_text(messages, tools=tools, **variables)

        if not self.prompts:
            return render(new)
        mark = uuid4().hex  # in no message, whatever they say
        chat = [*self.messages[:-1], {"role": "assistant", "content": mark}, *new]
        _, marked, tail = render(chat).rpartition(mark)
        if not marked:
            raise ValueError(
                "the chat template leaves earlier answers out, so a follow-up cannot extend its chat"
            )
        last = core.drawn  # the answer's end token, in the context or to be run before the prompt
        if last is None and core.kinds[-1] == 1:
            last = int(core.ids[-1])
        if last not in self.model.eos_token_ids:
            return tail
        return tail.removeprefix(tokenizer.decode([last], skip_special_tokens=False))

    def _check_turn(self, length: int) -> None:
        """Refuses a turn behind half a turn, and behind text of no turn, which a template would not show."""
        for place in self.prompts:
            if place.cut and place.messages:
                raise ValueError(
                    "the context was truncated within the messages of the chat's last turn; "
                    f"truncate it to {place.begins}, where that turn begins, to go on with the chat"
                )
        if not all(place.messages for place in self.prompts) or (length and not self.prompts):
            raise ValueError(
                "a chat turn cannot follow text that was read or run outside the chat; give that text in a "
                "message of the chat's first turn (prefix=PrefixCache() reads once what several chats share) "
                "or ask without chat=True"
            )


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if is_messages(prompt):
        return checked_messages(prompt)  # type: ignore[arg-type]
    raise TypeError("chat=True needs text or a list of messages, not token ids")
