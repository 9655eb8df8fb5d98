"""What a run asks: data sets with their items, prompts, limits and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lazyllm.llm import LLM
from lazyllm.longbench import items as files
from lazyllm.longbench.datasets import ENGLISH, dataset
from lazyllm.longbench.prompt import (
    CHATS,
    MAX_LENGTH,
    Chat,
    Prompt,
    chat_wrapper,
    make_prompt,
    post_process,
    stops,
)
from lazyllm.longbench.scoring import check_scorer, score_item
from lazyllm.longbench.templates import find_templates


@dataclass(frozen=True)
class Task:
    name: str
    category: str
    max_new_tokens: int


class Tasks(Protocol):
    """`items` by data set, in the order in which they are asked; `conditions` for the manifest."""

    items: Mapping[str, Sequence[Mapping[str, Any]]]
    conditions: Mapping[str, Any]

    def check(self, llm: LLM) -> None:
        """Raises what would keep each item from being asked."""

    def task(self, name: str) -> Task: ...
    def prompt(self, llm: LLM, task: Task, item: Mapping[str, Any]) -> Prompt: ...
    def stop_ids(self, llm: LLM, task: Task) -> frozenset[int]: ...
    def prediction(self, llm: LLM, text: str) -> str: ...
    def score(self, task: Task, prediction: str, item: Mapping[str, Any]) -> float: ...


def capped(own: int, cap: int | None) -> int:
    """New tokens of an answer: the task's own number, or fewer."""
    return min(own, cap or own)


@dataclass(frozen=True)
class Limits:
    """What of the data is asked, and how much of it the model sees and says; None is the benchmark's own."""

    limit: int | None = None
    sample: int | None = None
    min_item_length: int | None = None
    max_item_length: int | None = None
    max_length: int = MAX_LENGTH
    max_new_tokens: int | None = None
    chat: Chat = "auto"

    def __post_init__(self) -> None:
        files.check_count("max_length", self.max_length, 2)
        files.check_count("max_new_tokens", self.max_new_tokens, 1)
        if self.chat not in CHATS:
            raise ValueError(f"chat must be one of {', '.join(CHATS)}, not {self.chat!r}")

    def chosen(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return files.subset(rows, self.limit, self.sample, self.min_item_length, self.max_item_length)

    @property
    def choice(self) -> dict[str, int]:
        """Which items these are, where it is not all of them."""
        chosen = {
            "first items": self.limit,
            "sampled items": self.sample,
            "least item length": self.min_item_length,
            "most item length": self.max_item_length,
        }
        return {name: value for name, value in chosen.items() if value is not None}


class LongBench:
    """The benchmark's data sets, from the user's files."""

    def __init__(
        self,
        data: str | Path,
        names: Sequence[str] | None,
        prompts: Path | None,
        limits: Limits,
        edit_sim: str,
    ) -> None:
        held = files.available(data)
        wanted = tuple(names) if names else tuple(name for name in ENGLISH if name in held)
        files.require(data, wanted)
        if not wanted:
            raise FileNotFoundError(
                f"{data} holds no English data set but {', '.join(held) or 'none at all'}; "
                "name those to be asked in datasets"
            )
        for name in wanted:
            check_scorer(name, edit_sim)
        self._templates, self._limits, self._edit_sim = find_templates(data, prompts), limits, edit_sim
        self.items: Mapping[str, Sequence[Mapping[str, Any]]] = {
            name: limits.chosen(files.read(data, name)) for name in wanted
        }
        if empty := [name for name, rows in self.items.items() if not rows]:
            raise ValueError(f"no item of {', '.join(empty)} is within the limits")
        self.conditions: Mapping[str, Any] = {
            "prompts": self._templates.verdict(wanted),
            "prompts sha256": self._templates.digest(wanted),
            **limits.choice,
            "max length": limits.max_length,
            "cap on new tokens": limits.max_new_tokens,
            "chat": limits.chat,
            "edit similarity": edit_sim,
        }

    def check(self, llm: LLM) -> None:
        chat_wrapper(llm.tokenizer, self._limits.chat)

    def task(self, name: str) -> Task:
        most = capped(self._templates.max_new_tokens(name), self._limits.max_new_tokens)
        return Task(name, dataset(name).category, most)

    def prompt(self, llm: LLM, task: Task, item: Mapping[str, Any]) -> Prompt:
        return make_prompt(llm.tokenizer, item, self._limits.max_length, self._limits.chat, self._templates)

    def stop_ids(self, llm: LLM, task: Task) -> frozenset[int]:
        return frozenset(stops(task.name, llm.tokenizer).never_first)

    def prediction(self, llm: LLM, text: str) -> str:
        return post_process(chat_wrapper(llm.tokenizer, self._limits.chat), text)

    def score(self, task: Task, prediction: str, item: Mapping[str, Any]) -> float:
        return score_item(task.name, prediction, item["answers"], item["all_classes"], self._edit_sim)
