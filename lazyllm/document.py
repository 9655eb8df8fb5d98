"""Document: a text that is read once, and the questions about it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from lazyllm.counted_work import bare_flops
from lazyllm.generation import Generation, Stream
from lazyllm.method import Method
from lazyllm.prefix_cache import LEAST_PASS, PrefixCache, shared
from lazyllm.prompt import Conversation
from lazyllm.pruning import DENSE, Pruning

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.session import Session

JOINT = "\n\n"  # between the text and a question
QUESTIONS = ("?", "a")  # prompts with these are equal as far as every prompt about the text is


class Document:
    """A text that has been read up to the first stage; made by `LLM.document`.

    Each question is answered as if text and question had been one prompt, in the user's turn of the chat
    template with `chat`. A pruned document keeps other tokens for each question, and so computes the layers
    above the first stage anew for each; a dense one computes the question alone, and is better from some
    number of questions on, which `repr` names.
    """

    def __init__(self, llm: LLM, text: str, setting: Method, chat: bool, progress: bool) -> None:
        self.llm, self.text, self.pruning, self.chat_template = llm, text, setting, chat
        beginnings = [np.array(self._ids(question)) for question in QUESTIONS]
        self.ids = beginnings[0][: shared(*beginnings)]
        self._prefixes = PrefixCache(sys.maxsize)
        self._prefixes.read(llm, setting, self.ids.tolist(), progress)

    def __repr__(self) -> str:
        pruned, dense = costs(self.llm, self.pruning, len(self.ids))
        name = self.llm.config.name or "a model"
        text = f"<Document of {name}: {len(self.ids)} tokens read once, {self.pruning}"
        if self.pruning == DENSE:
            return f"{text}>"
        return (
            f"{text}; reading took {pruned[0]:.0%} of a dense prefill, each question takes {pruned[1]:.0%}; "
            f"without pruning reading takes 100%, a question {dense[1]:.0%}, which is less in all from "
            f"{break_even(pruned, dense)} questions on>"
        )

    @overload
    def ask(self, question: str, **options: Any) -> Generation: ...
    @overload
    def ask(self, question: Sequence[str], **options: Any) -> list[Generation]: ...
    def ask(self, question: str | Sequence[str], **options: Any) -> Generation | list[Generation]:
        """The answer to a question, or answers to a list of questions, each as if it were the only one.
        `options` are those of `LLM.generate`."""
        prompt = self._prompt(question) if isinstance(question, str) else [*map(self._prompt, question)]
        return self.llm.generate(prompt, self.pruning, **self._options(options))

    def stream(self, question: str, **options: Any) -> Stream:
        """Like `ask` for one question: an iterator over the text, which sets `generation` at its end."""
        return self.llm.stream(self._prompt(question), self.pruning, **self._options(options))

    def chat(self) -> DocumentChat:
        """A chat about the text: each question continues the turns before it."""
        if not self.chat_template:
            raise ValueError("the document was read without the chat template; make it with chat=True")
        return DocumentChat(self, self.llm.session(self.pruning, prefix=self._prefixes))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "chat": self.chat_template, "prefix": self._prefixes}

    def _prompt(self, question: str) -> str:
        if not isinstance(question, str) or not question:
            raise TypeError(f"a question must be text, not {question!r}")
        return f"{self.text}{JOINT}{question}"

    def _ids(self, question: str) -> list[int]:
        return Conversation(self.llm).encode(self._prompt(question), self.chat_template, 0, None)


class DocumentChat:
    """A chat about a document, in one session; `session` is that."""

    def __init__(self, document: Document, session: Session) -> None:
        self._document, self.session = document, session

    def __repr__(self) -> str:
        return f"<DocumentChat: {self.session!r}>"

    def ask(self, question: str, **options: Any) -> Generation:
        """The answer to a question that continues the chat; `options` are those of `Session.ask`."""
        prompt = question if self.session.length else self._document._prompt(question)
        return self.session.ask(prompt, chat=True, **options)


def costs(llm: LLM, setting: Method, n: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The counted work of reading `n` tokens and of a question behind them, as shares of a dense prefill of
    them: with the setting, and dense. A question's last pass has LEAST_PASS tokens."""
    config = llm.config
    dense = DENSE.flops(config, n)
    rows = min(n, LEAST_PASS)
    question = bare_flops(config, [n] * config.n_layers, [rows] * config.n_layers) / dense
    schedule = setting.for_prompt(config, n)
    core = schedule.core() or {}
    if not (isinstance(schedule, Pruning) and core["stages"]):
        return (1.0, question), (1.0, question)
    read = core["stages"][0][0] + 1  # layers
    in_play = schedule.planned(config, n)
    below = bare_flops(config, [n] * read + [0] * (config.n_layers - read), [n] * read + [0] * (config.n_layers - read))
    again = [rows] * read + in_play[read:]
    pruned = below / dense, bare_flops(config, in_play, again) / dense
    return pruned, (1.0, question)


def break_even(pruned: tuple[float, float], dense: tuple[float, float]) -> int:
    """The least number of questions with which a dense reading takes less in all."""
    return int((dense[0] - pruned[0]) / max(pruned[1] - dense[1], 1e-9)) + 1
