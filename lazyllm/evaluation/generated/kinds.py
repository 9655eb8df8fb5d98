"""Kinds of generated tasks: the draft of an item, and the item, fitted to a length.

An item has LongBench's fields. Its prompt, with chat template and longest answer, fills a given length in the
model's own tokens. The same seed gives the same item on every machine.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from lazyllm.evaluation.generated.material import Draws, file_text

Item = dict[str, Any]
Encode = Callable[[str, str], Sequence[int]]
"""The token ids of a whole prompt, from the user's text and the beginning of the answer."""
TEMPLATES: Mapping[str, str] = json.loads(file_text("templates.json"))
"""By the first word of a task's name: the user's text, whose fields are those of an item."""


@dataclass(frozen=True)
class Spec:
    """Random choices and length of an item; `depth` is in percent, `number` counts within a task."""

    draws: Draws
    depth: float
    length: int
    seed: int
    number: int


@dataclass(frozen=True)
class Draft:
    """An item before it is fitted to a length: `context(size)` grows with its size, from `min_size` on.

    `answer_prefix` is the beginning of the answer, `example` a worked example before the task. `turns` are
    questions about one text, the first of which is `input`: each with its input, answers and depth.
    """

    input: str
    answers: list[str]
    context: Callable[[int], str]
    min_size: int
    answer_prefix: str = ""
    example: str = ""
    turns: Sequence[Item] = ()


def strings_found(prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """The share of `answers` that occur in `prediction`, ignoring case; RULER's score."""
    return {"score": sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)}


@dataclass(frozen=True)
class Kind:
    """A kind of task. `score` gives fields of a result row for a prediction and the answers.

    `one_needle`: its depth can be chosen. `alone`: each of the turns is a prompt of its own. `whole_parts`:
    parts of the text are not cut, so that an item may be shorter than its length.
    """

    name: str
    category: str
    max_new_tokens: int
    draft: Callable[[Spec], Draft]
    score: Callable[[str, Sequence[str]], dict[str, float]] = strings_found
    one_needle: bool = False
    alone: bool = False
    whole_parts: bool = False

    @property
    def template(self) -> str:
        return TEMPLATES[self.name.partition("_")[0]]

    def item(self, encode: Encode, spec: Spec) -> Item:
        """The item, fitted to its length."""
        draft, length = self.draft(spec), spec.length
        place = f"-depth{spec.depth}" if self.one_needle else ""
        item = {
            "input": draft.input,
            "answer_prefix": draft.answer_prefix,
            "example": draft.example,
            "answers": draft.answers,
            "length": length,
            "dataset": self.name,
            "language": "en",
            "all_classes": None,
            "context": "",
            "_id": f"{self.name}-{length}{place}-seed{spec.seed}-{spec.number}",
            "depth": spec.depth if self.one_needle else None,
        }
        if draft.turns:
            item |= {"turns": draft.turns, "alone": self.alone}

        def tokens(size: int) -> int:
            text = self.template.format(**{**item, "context": draft.context(size)})
            return len(encode(text, draft.answer_prefix)) + self.max_new_tokens

        size, fitted = fit(tokens, length, draft.min_size)
        where = f"length is {length}; item {spec.number} of {self.name}"
        if fitted > length:
            raise ValueError(f"{where} needs at least {fitted} tokens")
        if not self.whole_parts and 100 * fitted < 97 * length:
            raise ValueError(f"{where} can only have {fitted} tokens or more than {length}")
        return item | {"context": draft.context(size)}


def fit(tokens: Callable[[int], int], length: int, min_size: int) -> tuple[int, int]:
    """A size and its number of tokens: at most `length`, and within 1 percent of it or the largest that fits.

    If even `min_size` is too large, `min_size` is returned.
    """
    low = high = (min_size, tokens(min_size))
    while high[1] <= length:
        low, high = high, (2 * high[0], tokens(2 * high[0]))
    for share in cycle((None, 0.5)):  # in turn at the interpolated size and in the middle
        if high[0] - low[0] <= 1 or 100 * low[1] >= 99 * length:
            break
        share = share or (length - low[1]) / (high[1] - low[1])
        size = min(max(low[0] + int((high[0] - low[0]) * share), low[0] + 1), high[0] - 1)
        tried = size, tokens(size)
        low, high = (tried, high) if tried[1] <= length else (low, tried)
    return low
