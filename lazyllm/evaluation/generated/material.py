"""The material of items: random choices seeded by a label, words, codes, and the text around needles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import accumulate, chain, cycle, islice
from random import Random
from string import ascii_lowercase
from typing import TypeVar
from uuid import UUID

Drawn = TypeVar("Drawn")
DEPTHS = tuple(round(100 * place / 39) for place in range(40))  # percent, as in RULER
PROSE_SENTENCES = 3000  # about 50,000 tokens
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
BEFORE_VOWEL = re.compile(r"\b([Aa])(?= (?:[aeio]|u(?!ni[^n]|s)))")


@cache
def file_text(name: str) -> str:
    """The text of a file in texts/, without its last line break."""
    return (files(__package__) / "texts" / name).read_text("utf-8").removesuffix("\n")


@cache
def vocabulary(kind: str) -> tuple[str, ...]:
    """Common English words, each an "adjective" or a "noun"; no word is part of another one."""
    return tuple(file_text(f"{kind}.txt").split())


# ---- random choices ------------------------------------------------------------------------------


class Draws:
    """Random choices seeded by a label, made from random() only, which is stable across Python versions."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._random = Random(int.from_bytes(sha256(label.encode()).digest(), "big")).random

    def fork(self, name: str) -> Draws:
        """Independent choices, which do not depend on how many were made here before."""
        return Draws(f"{self._label}/{name}")

    def below(self, count: int) -> int:
        """A number from 0 to count - 1."""
        return int(self._random() * count)

    def chosen(self, values: Sequence[Drawn]) -> Drawn:
        return values[self.below(len(values))]

    def depths(self, count: int) -> list[int]:
        """`count` distinct ones of DEPTHS."""
        return [DEPTHS[place] for place in islice(self.order(len(DEPTHS)), count)]

    def order(self, count: int) -> Iterator[int]:
        """The numbers 0 to count - 1 shuffled, each drawn when it is asked for."""
        moved: dict[int, int] = {}  # by place: the number there, where it is not the place itself
        for place in range(count):
            drawn = place + self.below(count - place)
            yield moved.get(drawn, drawn)
            moved[drawn] = moved.get(place, place)

    def shuffled(self, values: Sequence[Drawn]) -> list[Drawn]:
        return [values[place] for place in self.order(len(values))]


def names(draws: Draws, joint: str = "-") -> Iterator[str]:
    """Distinct names such as calm-harbor."""
    adjectives, nouns = vocabulary("adjective"), vocabulary("noun")
    count = len(adjectives) * len(nouns)
    for pair in draws.order(count):
        yield f"{adjectives[pair // len(nouns)]}{joint}{nouns[pair % len(nouns)]}"
    raise ValueError(f"the item needs more than the {count} names there are; use a smaller length")


def numbers(draws: Draws, digits: int = 7) -> Iterator[str]:
    first = 10 ** (digits - 1)
    while True:
        yield str(first + draws.below(9 * first))


def uuids(draws: Draws) -> Iterator[str]:
    while True:
        parts = [draws.below(1 << 32) for _ in range(4)]
        yield str(UUID(int=sum(part << 32 * place for place, part in enumerate(parts)), version=4))


def codewords(draws: Draws, letters: int) -> Iterator[str]:
    while True:
        yield "".join(ascii_lowercase[draws.below(26)] for _ in range(letters))


# ---- the text around the needles -----------------------------------------------------------------


class Haystack:
    """A text of repeated sentences, of any length."""

    def __init__(self, text: str) -> None:
        self.sentences = [" ".join(sentence.split()) for sentence in SENTENCE_END.split(text)]
        self.folded = " ".join(self.sentences).casefold()

    def first(self, words: int, start: int = 0) -> list[str]:
        """`words` words in whole sentences from sentence `start` on; the last sentence is cut to fit."""
        text: list[str] = []
        for sentence in islice(cycle(self.sentences), start, None):
            if words <= 0:
                break
            parts = sentence.split()
            whole = len(parts) <= words
            text.append(sentence if whole else " ".join(parts[:words]).rstrip(",;:.") + ".")
            words -= len(parts)
        return text

    def around(self, needles: Iterable[tuple[float, str]], words: int, start: int) -> str:
        """`words` words with each needle between two sentences, at its depth in percent."""
        text = [[], *([sentence] for sentence in self.first(words, start))]  # each with the needles after it
        ends = list(accumulate(len(" ".join(part).split()) for part in text))
        for percent, needle in needles:
            place = min(range(len(ends)), key=lambda place: abs(ends[place] - words * percent / 100))
            text[place].append(needle)
        return " ".join(chain.from_iterable(text))


@cache
def noise() -> Haystack:
    """A few sentences of no interest, repeated."""
    return Haystack(file_text("noise.txt"))


@cache
def prose() -> Haystack:
    """Prose whose sentences differ; after PROSE_SENTENCES it repeats."""
    draws, patterns = Draws("prose"), file_text("patterns.txt").splitlines()

    def sentence() -> str:
        filled = re.sub("{(.+?)}", lambda slot: draws.chosen(vocabulary(slot[1])), draws.chosen(patterns))
        return BEFORE_VOWEL.sub(r"\1n", filled)

    return Haystack(" ".join(sentence() for _ in range(PROSE_SENTENCES)))


def distinct(candidates: Iterable[str], text: Haystack | None = None) -> Iterator[str]:
    """The candidates without repetitions and without those that occur in `text`; None is the noise."""
    folded, seen = (text or noise()).folded, set[str]()
    for candidate in candidates:
        if candidate not in seen and candidate.casefold() not in folded:
            seen.add(candidate)
            yield candidate
