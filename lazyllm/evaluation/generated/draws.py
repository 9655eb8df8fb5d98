"""Random choices seeded by a label; and what is chosen: words, names, numbers, codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import islice
from random import Random
from string import ascii_lowercase
from typing import TypeVar
from uuid import UUID

Drawn = TypeVar("Drawn")
DEPTHS = tuple(round(100 * place / 39) for place in range(40))  # percent, as in RULER


@cache
def file_text(name: str) -> str:
    """The text of NAME.txt without its last line break."""
    return (files(__package__) / "texts" / f"{name}.txt").read_text("utf-8").removesuffix("\n")


@cache
def vocabulary(kind: str) -> tuple[str, ...]:
    """Common English words, each an "adjective" or a "noun"; no word is part of another one."""
    return tuple(file_text(kind).split())


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


def names(draws: Draws) -> Iterator[str]:
    """Distinct names such as calm-harbor."""
    adjectives, nouns = vocabulary("adjective"), vocabulary("noun")
    count = len(adjectives) * len(nouns)
    for pair in draws.order(count):
        yield f"{adjectives[pair // len(nouns)]}-{nouns[pair % len(nouns)]}"
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
