"""The interface between the runner and a benchmark: data sets with items, prompts, limits and scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lazyllm.evaluation.chats import XGEN_ASSISTANT, AnyWrapper, Wrapper, chat_wrapper
from lazyllm.generation import Request
from lazyllm.llm import LLM

Shorten = Callable[[str], str]
"""Compresses a text."""


@dataclass(frozen=True)
class ItemPrompt:
    """The token ids of an item's prompt; `cut` if it was too long and lost a part."""

    ids: list[int]
    cut: bool
    wrapper: Wrapper


class Tasks(Protocol):
    """A benchmark. `items` is by data set, in running order. For the manifest: `conditions`, which all rows
    of a run share, and `selection`, which says how the items were chosen."""

    items: Mapping[str, Sequence[Mapping[str, Any]]]
    conditions: Mapping[str, Any]
    selection: Mapping[str, Any]
    wrapper: AnyWrapper

    def check(self, llm: LLM) -> None:
        """Raises an error that would otherwise fail every item."""
        return

    def request(self, llm: LLM, name: str) -> Request:
        """The options of an answer to an item of that data set: its limit, and what else ends it."""

    def prompt(self, llm: LLM, name: str, item: Mapping[str, Any], shorten: Shorten | None = None) -> ItemPrompt:
        """The prompt of an item; `shorten` is applied to its context, after a cut to the longest length."""

    def turns(self, name: str, item: Mapping[str, Any]) -> list[str]:
        """The user's turns of an item that has several questions; whole prompts where each is asked alone."""
        return []

    def prediction(self, llm: LLM, text: str) -> str:
        """The part of an answer that is scored, by the model's wrapper, also where prompts are not wrapped."""
        of_xgen = chat_wrapper(llm.tokenizer, self.wrapper) == "xgen"
        return text.strip().replace(XGEN_ASSISTANT.strip(), "") if of_xgen else text

    def score(self, name: str, prediction: str, item: Mapping[str, Any]) -> dict[str, float]:
        """Fields of a result row: `score`, from 0 to 1, and others that a task has."""
