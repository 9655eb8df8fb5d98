"""Generated tasks as a run asks them: RULER-style ones by length, a needle by depth and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyllm.llm import LLM
from lazyllm.longbench import ruler
from lazyllm.longbench.niah import DEPTHS, grid
from lazyllm.longbench.prompt import Chat, Prompt, chat_wrapper, post_process, wrapped
from lazyllm.longbench.ruler import TASKS, Item
from lazyllm.longbench.string_match import string_match
from lazyllm.longbench.tasks import Task, capped
from lazyllm.tokenizer import Tokenizer

AT = "@"  # niah_single_1@4096: a task at a length, which the report takes as a data set
ONE_DEPTH = "niah_single_1"


def data_set(task: str, length: int) -> str:
    return f"{task}{AT}{length}"


def task_and_length(name: str) -> tuple[str, int]:
    task, _, length = name.partition(AT)
    return task, int(length)


def ruler_items(
    tokenizer: Tokenizer,
    tasks: Sequence[str] | None,
    lengths: Sequence[int],
    count: int,
    seed: int,
    prose: str | Path | None,
) -> dict[str, list[Item]]:
    """`count` items of each task at each length; None is all tasks."""
    names = tuple(tasks) if tasks else tuple(TASKS)
    text = None if prose is None else ruler.Haystack.read(prose)
    return {
        data_set(name, length): ruler.generate(name, tokenizer, length, count, seed, prose=text)
        for length in lengths
        for name in names
    }


def niah_items(
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    count: int = 1,
    seed: int = 0,
    prose: str | Path | None = None,
) -> dict[str, list[Item]]:
    """By length; an item's id begins with its depth."""
    made: dict[str, list[Item]] = {}
    for length in lengths:
        items = grid(tokenizer, [length], depths, count, seed, ONE_DEPTH, prose)
        places = [(depth, number) for depth in depths for number in range(count)]
        made[data_set(ONE_DEPTH, length)] = [
            {**item, "_id": f"{depth:g}/{number}"}
            for item, (depth, number) in zip(items, places, strict=True)
        ]
    return made


def heat_map_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What niah.heat_map draws, of a run's lines."""
    return [
        {
            "setting": row["setting"],
            "length": task_and_length(row["dataset"])[1],
            "depth": float(row["item"].partition("/")[0]),
            "score": row["score"],
        }
        for row in rows
        if "score" in row
    ]


class Generated:
    """Items without files: prompt, limits and score are the tasks' own."""

    def __init__(
        self,
        items: Mapping[str, Sequence[Item]],
        asked: Mapping[str, Any],
        chat: Chat,
        max_new_tokens: int | None = None,
    ) -> None:
        self.items: Mapping[str, Sequence[Mapping[str, Any]]] = items
        self.conditions: Mapping[str, Any] = {"chat": chat, "cap on new tokens": max_new_tokens, **asked}
        self._chat: Chat = chat
        self._most = max_new_tokens

    def check(self, llm: LLM) -> None:
        chat_wrapper(llm.tokenizer, self._chat)
        for name in self.items:
            length, most = task_and_length(name)[1], self.task(name).max_new_tokens
            if length + most > llm.config.context:
                raise ValueError(
                    f"a prompt of {length} tokens and an answer of up to {most} are more than the model's "
                    f"context of {llm.config.context}"
                )

    def task(self, name: str) -> Task:
        chosen = TASKS[task_and_length(name)[0]]
        return Task(name, chosen.category, capped(chosen.max_new_tokens, self._most))

    def prompt(self, llm: LLM, task: Task, item: Mapping[str, Any]) -> Prompt:
        text = TASKS[task_and_length(task.name)[0]].template.format(**item)
        wrapper, ids = chat_wrapper(llm.tokenizer, self._chat), llm.tokenizer.encode(text)
        if wrapper == "none":
            return Prompt(ids, len(ids), False, wrapper)
        return Prompt(wrapped(llm.tokenizer, text, wrapper), len(ids), False, wrapper)

    def stop_ids(self, llm: LLM, task: Task) -> frozenset[int]:
        return frozenset()

    def prediction(self, llm: LLM, text: str) -> str:
        return post_process(chat_wrapper(llm.tokenizer, self._chat), text)

    def score(self, task: Task, prediction: str, item: Mapping[str, Any]) -> float:
        return string_match(prediction, item["answers"])
