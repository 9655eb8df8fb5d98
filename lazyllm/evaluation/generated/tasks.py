"""Generated tasks for the runner: RULER's kinds by length, one needle by depth and length, their score."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count as counted
from statistics import fmean
from typing import Any

from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.evaluation.chats import AnyWrapper, chat_wrapper, wrapped_ids
from lazyllm.evaluation.generated.haystack import Haystack
from lazyllm.evaluation.generated.items import TASKS, TooShort, generate
from lazyllm.evaluation.generated.kinds import Encode, Item, Kind
from lazyllm.evaluation.generated.questions import QA, read_questions
from lazyllm.evaluation.generated.quotes import QUOTES, lines_right, similarity
from lazyllm.evaluation.generated.ruler import OF_RULER, ONE_NEEDLE
from lazyllm.evaluation.options import NiahOptions, RulerOptions
from lazyllm.evaluation.tasks import ItemPrompt, Shorten, Tasks
from lazyllm.llm import LLM
from lazyllm.support import checked

RULER, NIAH = "ruler", "niah"
AT = "@"  # niah_single_1@4096: a task at a length is a data set of its own
IN_NOISE, IN_PROSE = ONE_NEEDLE[:2]
LENGTH_STEP = 64  # tokens; the shortest length that fits is searched in multiples of this


def task_and_length(data_set: str) -> tuple[str, int]:
    task, _, length = data_set.partition(AT)
    return task, int(length)


def kind_of(data_set: str) -> Kind:
    return TASKS[task_and_length(data_set)[0]]


def prompt_encoder(tokenizer: Tokenizer, wrapper: AnyWrapper) -> Encode:
    chosen = chat_wrapper(tokenizer, wrapper)
    return lambda text, answer_prefix: wrapped_ids(tokenizer, text, chosen, answer_prefix)


def ruler_items(encode: Encode, options: RulerOptions) -> dict[str, list[Item]]:
    """The items of each task at each length, by data set; default: RULER's tasks that have their files."""
    checked.a_list(options.tasks, "tasks", '["niah_single_1"]')
    checked.a_list(options.lengths, "lengths", "[1024, 4096]")
    prose = None if options.prose is None else Haystack.read(options.prose)
    questions = {name: read_questions(options.qa, name) for name in QA if options.qa is not None}
    of_ruler = (kind.name for kind in OF_RULER)
    names = tuple(options.tasks or (name for name in of_ruler if name not in QA or questions.get(name)))

    def items(name: str, length: int) -> list[Item]:
        """No items if the length is too short."""
        asked = questions.get(name)
        try:
            return generate(name, encode, length, options.count, options.seed, prose=prose, questions=asked)
        except TooShort:
            return []

    by_data_set: dict[str, list[Item]] = {}
    for length in options.lengths:
        by_task = {name: items(name, length) for name in names}
        if short := [name for name in names if not by_task[name]]:
            longer = counted(length - length % LENGTH_STEP + LENGTH_STEP, LENGTH_STEP)
            enough = next(least for least in longer if all(items(name, least) for name in short))
            fitting = ",".join(name for name in names if by_task[name])
            raise ValueError(
                f"length {length} is too short for {', '.join(short)}; choose lengths of {enough} or more"
                + (f", or only the tasks {fitting} (--tasks)" if fitting else "")
            )
        by_data_set |= {f"{name}{AT}{length}": rows for name, rows in by_task.items()}
    return by_data_set


def niah_items(encode: Encode, options: NiahOptions) -> dict[str, list[Item]]:
    """The items at each depth and length, by data set; an item's id is DEPTH/NUMBER.

    Items of a length differ only in depth.
    """
    for name, example in (("lengths", "[1024, 4096]"), ("depths", "[0, 50, 100]")):
        checked.a_list(values := getattr(options, name), name, example)
        if not len(values) or len({*values}) < len(values):
            raise ValueError(f"{name} must be different numbers, at least one, not {values!r}")
    task, prose = (IN_NOISE, None) if options.prose is None else (IN_PROSE, Haystack.read(options.prose))

    def items(length: int, depth: float) -> list[Item]:
        return generate(task, encode, length, options.count, options.seed, depth, prose)

    return {
        f"{task}{AT}{length}": [
            {**item, "_id": f"{depth:g}/{number}"}
            for depth in options.depths
            for number, item in enumerate(items(length, depth))
        ]
        for length in options.lengths
    }


def needles_found(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[tuple[float, int], float]]:
    """By setting, then by depth and length: the mean score of a niah run's result rows, 0 to 100."""
    scores: dict[str, dict[tuple[float, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        place = float(row["item"].partition("/")[0]), task_and_length(row["dataset"])[1]
        scores[row["setting"]][place].append(100 * row["score"])
    return {
        setting: {place: fmean(values) for place, values in by_place.items()}
        for setting, by_place in scores.items()
    }


def string_match(prediction: str, answers: Sequence[str], any_answer: bool = False) -> float:
    """The share of `answers` that occur in `prediction`, ignoring case; RULER's score.

    With `any_answer` one of them is enough for 1.
    """
    n_found = sum(answer.lower() in prediction.lower() for answer in answers)
    return float(n_found > 0) if any_answer else n_found / len(answers)


class GeneratedTasks(Tasks):
    """Generated items; the string match is their score."""

    def __init__(
        self, llm: LLM, options: RulerOptions | NiahOptions, max_new_tokens: int | None = None
    ) -> None:
        encode = prompt_encoder(llm.tokenizer, options.wrapper)
        if isinstance(options, NiahOptions):
            kind, self.items = NIAH, niah_items(encode, options)
        else:
            kind, self.items = RULER, ruler_items(encode, options)
        self.selection, self.wrapper = options.selection, options.wrapper
        self.conditions = {"tasks": kind, "cap on new tokens": max_new_tokens}
        self._max_new_tokens = max_new_tokens

    def check(self, llm: LLM) -> None:
        for name in self.items:
            if (length := task_and_length(name)[1]) > llm.config.context:
                raise ValueError(
                    f"length {length}, a prompt and its answer, is more than the model's context of "
                    f"{llm.config.context}"
                )

    def max_new_tokens(self, name: str) -> int:
        limit = kind_of(name).max_new_tokens
        return min(limit, self._max_new_tokens or limit)

    def prompt(
        self, llm: LLM, name: str, item: Mapping[str, Any], shorten: Shorten | None = None
    ) -> ItemPrompt:
        text, wrapper = self._text(name, item, shorten), chat_wrapper(llm.tokenizer, self.wrapper)
        return ItemPrompt(wrapped_ids(llm.tokenizer, text, wrapper, item["answer_prefix"]), False, wrapper)

    def turns(self, name: str, item: Mapping[str, Any]) -> list[str]:
        questions = item["turns"]
        if item["alone"]:
            return [self._text(name, {**item, **question}) for question in questions]
        return [self._text(name, item), *(question["input"] for question in questions[1:])]

    def _text(self, name: str, item: Mapping[str, Any], shorten: Shorten | None = None) -> str:
        context = shorten(item["context"]) if shorten else item["context"]
        return kind_of(name).template.format(**{**item, "context": context})

    def score(self, name: str, prediction: str, item: Mapping[str, Any]) -> float:
        kind = kind_of(name)
        if kind in QUOTES:
            return lines_right(prediction, item["answers"][0])
        return string_match(prediction, item["answers"], any_answer=kind.name in QA)

    def details(self, name: str, prediction: str, item: Mapping[str, Any]) -> dict[str, float]:
        is_quote = kind_of(name) in QUOTES
        return {"similarity": similarity(prediction, item["answers"][0])} if is_quote else {}
