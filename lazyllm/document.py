"""Document: a text that is read once, and the questions about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from lazyllm.counted_work import bare_flops
from lazyllm.generation import Generation, Options, Request, Stream
from lazyllm.method import Method
from lazyllm.prefix_cache import PrefixCache, shared
from lazyllm.pruning import DENSE, Pruning
from lazyllm.session import Session
from lazyllm.support.signatures import takes

if TYPE_CHECKING:
    from lazyllm.llm import LLM

JOINT = "\n\n"  # between the text and a question
QUESTION_ROWS = 64  # of a question, in `costs`: a sentence, the end of a chat template, and reading the weights
QUESTIONS = ("?", "a")  # their prompts differ where the prompts of different questions begin to differ


class Document:
    """A text that has been read up to the first stage; made by `LLM.document`.

    Each question is answered as if text and question had been one prompt, in the user's turn of the chat
    template with `chat`. A pruned document selects tokens for each question anew; a dense one computes the
    question alone, and takes less in total from the number of questions on that `repr` names.
    """

    def __init__(self, llm: LLM, session: Session, text: str, chat: bool, progress: bool = True) -> None:
        """`session`, of the LLM, is empty or has read the text."""
        self.llm, self.pruning = llm, session.setting
        self.text, self._in_chat, self._session = text, chat, session
        if not session.length:
            first, second = (session.encode(self._prompt(question), Request(chat=chat)).ids for question in QUESTIONS)
            session.read(first[: shared(first, second)], progress)
            session.document = {"text": text, "chat": chat}
        self._prefixes = PrefixCache.of(session)

    def __repr__(self) -> str:
        n = self._session.length
        text = f"<Document of {self.llm.config.name or 'a model'}: {n} tokens read, {self.pruning.label}"
        read, question, dense_question, break_even = costs(self.llm, self.pruning, n)
        if break_even is None:
            return f"{text}>"
        return (
            f"{text}; reading took the work of {read:.2f} dense prefills, each question takes {question:.2f}; dense, "
            f"reading takes 1 and a question {dense_question:.2f}, less in all from {break_even} questions on>"
        )

    @overload
    def ask(self, question: str, **options: Unpack[Options]) -> Generation: ...
    @overload
    def ask(self, question: list[str] | tuple[str, ...], **options: Unpack[Options]) -> list[Generation]: ...
    @takes(Request, "never_first", "chat")
    def ask(self, question: Any, **options: Unpack[Options]) -> Any:
        """The answer to a question, or answers to a list of them, each as if it were the only one."""
        options["chat"] = self._in_chat
        several = isinstance(question, list | tuple)
        prompt = [self._prompt(item) for item in question] if several else self._prompt(question)
        return self.llm.generate(prompt, self.pruning, prefix=self._prefixes, **options)

    @takes(Request, "never_first", "chat")
    def stream(self, question: str, **options: Unpack[Options]) -> Stream:
        """Like `ask` for one question: an iterator over the text, which sets `generation` at its end."""
        options["chat"] = self._in_chat
        return self.llm.stream(self._prompt(question), self.pruning, prefix=self._prefixes, **options)

    def chat(self) -> DocumentChat:
        """A chat about the text: each question continues the turns before it."""
        if not self._in_chat:
            raise ValueError("the document was read outside the chat template; make it with chat=True")
        return DocumentChat(self, self.llm.session(self.pruning, self._prefixes))

    def save(self, file: str | Path, progress: bool = True) -> None:
        """Writes the text and what has been computed of it to a file; `LLM.restore_document` opens it."""
        self._session.save(file, progress)

    def _prompt(self, question: str) -> str:
        if not isinstance(question, str) or not question:
            raise TypeError(f"a question must be text that is not empty, not {question!r:.80}")
        return f"{self.text}{JOINT}{question}"


@dataclass
class DocumentChat:
    """A chat about a document; `session` is its context."""

    document: Document
    session: Session

    @takes(Request, "never_first", "chat")
    def ask(self, question: str, **options: Unpack[Options]) -> Generation:
        """The answer to a question that continues the chat; options as in `Session.ask`."""
        prompt = question if self.session.length else self.document._prompt(question)
        options["chat"] = True
        return self.session.ask(prompt, **options)


def costs(model: LLM, setting: Method, n: int) -> tuple[float, float, float, int | None]:
    """Counted work, in dense prefills of `n` tokens: of reading them, of a question, of a question after a dense
    reading; and the least number of questions for which dense takes less in total, None if it never does."""
    config, rows, n_layers = model.config_for(setting), min(n, QUESTION_ROWS), model.config.n_layers
    dense = DENSE.flops(config, n)
    dense_question = bare_flops(config, np.tile([n, rows], (n_layers, 1))) / dense
    pruning = setting.for_prompt(config, n)
    if not isinstance(pruning, Pruning) or not pruning.stages:
        return 1.0, dense_question, dense_question, None
    below, in_play = pruning.stages[0][0] + 1, pruning.planned(config, n)  # layers that reading computes
    layers = [n] * below + [0] * (n_layers - below)
    read = bare_flops(config, np.stack([layers, layers], axis=1)) / dense
    question = bare_flops(config, np.stack([in_play, [rows] * below + in_play[below:]], axis=1)) / dense
    break_even = int((1 - read) / (question - dense_question)) + 1 if question > dense_question else None
    return read, question, dense_question, break_even
