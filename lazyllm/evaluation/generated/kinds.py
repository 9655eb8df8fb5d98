"""Kinds of generated tasks, and the two forms of an item: what it is made of, and its draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lazyllm.evaluation.generated.draws import Draws, file_text
from lazyllm.evaluation.generated.haystack import Haystack
from lazyllm.evaluation.generated.questions import Questions

Item = dict[str, Any]
Encode = Callable[[str, str], Sequence[int]]
"""The token ids of a whole prompt, from the user's text and the beginning of the answer."""


@dataclass(frozen=True)
class Spec:
    """Random choices, texts and length of an item; `depth` is in percent, `number` counts within a task."""

    draws: Draws
    depth: float
    prose: Haystack
    questions: Questions
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
    answer_prefix: str
    answers: list[str]
    context: Callable[[int], str]
    min_size: int
    example: str = ""
    turns: Sequence[Item] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of task."""

    name: str
    category: str
    max_new_tokens: int
    draft: Callable[[Spec], Draft]

    @property
    def template(self) -> str:
        """The user's text, whose fields are those of an item."""
        return file_text(self.name.partition("_")[0])
