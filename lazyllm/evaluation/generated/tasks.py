"""Generated tasks as the runner sees them: RULER-style tasks by length, one needle by depth and length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.evaluation.chats import Chat, chat_wrapper, post_process, wrapped_ids
from lazyllm.evaluation.generated.haystack import Haystack
from lazyllm.evaluation.generated.questions import QA, read_questions
from lazyllm.evaluation.generated.ruler import ONE_NEEDLE, TASKS, Encode, Item, TooShort, generate
from lazyllm.evaluation.generated.string_match import string_match
from lazyllm.evaluation.options import DEPTHS, RunOptions
from lazyllm.evaluation.tasks import ItemPrompt, Shorten, Stops, Task
from lazyllm.llm import LLM

RULER, NIAH = "ruler", "niah"
AT = "@"  # niah_single_1@4096: a task at a length is a data set of its own
IN_NOISE, IN_PROSE = ONE_NEEDLE[:2]
LENGTH_STEP = 64  # tokens; the shortest length that fits is searched in multiples of this


def data_set(task: str, length: int) -> str:
    return f"{task}{AT}{length}"


def task_and_length(name: str) -> tuple[str, int]:
    task, _, length = name.partition(AT)
    return task, int(length)


def prompt_encoder(tokenizer: Tokenizer, chat: Chat) -> Encode:
    wrapper = chat_wrapper(tokenizer, chat)
    return lambda text, answer_prefix: wrapped_ids(tokenizer, text, wrapper, answer_prefix)


def ruler_items(
    encode: Encode,
    tasks: Sequence[str] | None,
    lengths: Sequence[int],
    count: int,
    seed: int,
    prose: str | Path | None = None,
    qa: str | Path | None = None,
) -> dict[str, list[Item]]:
    """`count` items of each task at each length, by data set; None is all tasks that have their files."""
    text = None if prose is None else Haystack.read(prose)
    questions = {name: read_questions(qa, name) for name in QA} if qa is not None else {}
    names = tuple(tasks or (name for name in TASKS if name not in QA or questions.get(name)))

    def items(name: str, length: int) -> list[Item]:
        return generate(name, encode, length, count, seed, prose=text, questions=questions.get(name))

    made: dict[str, list[Item]] = {}
    for length in lengths:
        needed: dict[str, int] = {}  # by task: the tokens that it needs
        for name in names:
            try:
                made[data_set(name, length)] = items(name, length)
            except TooShort as error:
                needed[name] = error.needed
        if needed:
            fitting = [name for name in names if name not in needed]
            advice = f", or only the tasks {','.join(fitting)} (--tasks)" if fitting else ""
            raise ValueError(
                f"length {length} is too short for {', '.join(needed)}; choose lengths of "
                f"{shortest_length(items, needed)} or more{advice}"
            )
    return made


def shortest_length(items: Callable[[str, int], object], needed: Mapping[str, int]) -> int:
    """The least multiple of LENGTH_STEP at which `items(task, length)` makes every task in `needed`."""
    length = -(-max(needed.values()) // LENGTH_STEP) * LENGTH_STEP
    for name in needed:
        while True:
            try:
                items(name, length)
                break
            except TooShort:
                length += LENGTH_STEP
    return length


def grid(
    encode: Encode,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    count: int = 1,
    seed: int = 0,
    task: str = IN_NOISE,
    prose: str | Path | None = None,
) -> list[Item]:
    """`count` items for each length and each depth, in percent; items of a length differ only in depth."""
    if task not in ONE_NEEDLE:
        raise ValueError(f"a grid of depths needs one of {', '.join(ONE_NEEDLE)}, not {task!r}")
    for name, values in (("lengths", lengths), ("depths", depths)):
        if not len(values) or len({*values}) < len(values):
            raise ValueError(f"{name} must be different numbers, at least one, not {values!r}")
    text = None if prose is None else Haystack.read(prose)
    return [
        item
        for length in lengths
        for depth in depths
        for item in generate(task, encode, length, count, seed, depth, text)
    ]


def niah_items(
    encode: Encode,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    count: int = 1,
    seed: int = 0,
    prose: str | Path | None = None,
) -> dict[str, list[Item]]:
    """`count` items at each depth and length, by data set; an item's id is DEPTH/NUMBER."""
    task = IN_NOISE if prose is None else IN_PROSE
    made: dict[str, list[Item]] = {}
    for length in lengths:
        items = grid(encode, [length], depths, count, seed, task, prose)
        places = [(depth, number) for depth in depths for number in range(count)]
        made[data_set(task, length)] = [
            {**item, "_id": f"{depth:g}/{number}"}
            for item, (depth, number) in zip(items, places, strict=True)
        ]
    return made


def needles_found(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[tuple[float, int], float]]:
    """By setting, then by depth and length: the mean score of a niah run's result rows, 0 to 100."""
    scores: defaultdict[str, defaultdict[tuple[float, int], list[float]]]
    scores = defaultdict(lambda: defaultdict(list))
    for row in rows:
        place = float(row["item"].partition("/")[0]), task_and_length(row["dataset"])[1]
        scores[row["setting"]][place].append(row["score"])
    return {
        setting: {place: 100 * sum(found) / len(found) for place, found in by_place.items()}
        for setting, by_place in scores.items()
    }


class GeneratedTasks:
    """Implements `Tasks` for generated items; the string match is their score. `kind` is RULER or NIAH."""

    def __init__(
        self,
        items: Mapping[str, Sequence[Item]],
        kind: str,
        selection: Mapping[str, Any],
        options: RunOptions,
        max_new_tokens: int | None = None,
    ) -> None:
        self.items: Mapping[str, Sequence[Mapping[str, Any]]] = items
        self.conditions: Mapping[str, Any] = {"tasks": kind, "cap on new tokens": max_new_tokens}
        self.selection: Mapping[str, Any] = {
            name: value for name, value in selection.items() if value is not None
        }
        self._chat, self._max_new_tokens = options.chat, max_new_tokens

    def check(self, llm: LLM) -> None:
        for name in self.items:
            if (length := task_and_length(name)[1]) > llm.config.context:
                raise ValueError(
                    f"length {length}, a prompt and its answer, is more than the model's context of "
                    f"{llm.config.context}"
                )

    def task(self, name: str) -> Task:
        task = TASKS[task_and_length(name)[0]]
        limit = min(task.max_new_tokens, self._max_new_tokens or task.max_new_tokens)
        return Task(name, task.category, limit)

    def prompt(
        self, llm: LLM, task: Task, item: Mapping[str, Any], shorten: Shorten | None = None
    ) -> ItemPrompt:
        context = shorten(item["context"]) if shorten else item["context"]
        text = TASKS[task_and_length(task.name)[0]].template.format(**{**item, "context": context})
        wrapper, n_tokens = chat_wrapper(llm.tokenizer, self._chat), len(llm.tokenizer.encode(text))
        ids = wrapped_ids(llm.tokenizer, text, wrapper, item["answer_prefix"])
        return ItemPrompt(ids, n_tokens, False, wrapper)

    def stops(self, llm: LLM, task: Task) -> Stops:
        return Stops()

    def prediction(self, llm: LLM, text: str) -> str:
        return post_process(chat_wrapper(llm.tokenizer, self._chat), text)

    def score(self, task: Task, prediction: str, item: Mapping[str, Any]) -> float:
        any_answer = TASKS[task_and_length(task.name)[0]].any_answer
        return string_match(prediction, item["answers"], any_answer)
