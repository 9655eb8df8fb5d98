"""The text around the needles: noise, prose made by rule, or the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate, chain, cycle, islice
from pathlib import Path

from lazyllm.evaluation.generated.draws import Draws
from lazyllm.evaluation.generated.words import ADJECTIVES, NOUNS
from lazyllm.support.files import user_path

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)])\s+|\n\s*\n")  # noqa: RUF001 - quotation marks


class Haystack:
    """A text of repeated sentences, of any length."""

    def __init__(self, text: str) -> None:
        sentences = (" ".join(sentence.split()) for sentence in SENTENCE_END.split(text))
        self.sentences = [sentence for sentence in sentences if sentence]
        self._folded = " ".join(self.sentences).casefold()

    @classmethod
    def read(cls, folder: str | Path) -> Haystack:
        """Sentences of the .txt files in a folder, ordered by file name."""
        path = user_path(folder)
        if not path.is_dir():
            raise FileNotFoundError(f"prose: {path} is no folder; expected one with .txt files")
        haystack = cls("\n\n".join(map(read_text, sorted(path.glob("*.txt")))))
        if not haystack.sentences:
            raise ValueError(f"prose: {path} has no .txt file with text in it")
        return haystack

    def holds(self, text: str) -> bool:
        return text.casefold() in self._folded

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


def read_text(file: Path) -> str:
    """The file's text; an error names the file."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prose: {file} is not UTF-8 text: {error}") from None


NOISE = Haystack(
    """
    The road is long and the day is mild. Rain comes early and is gone by noon. A cart goes by, and then
    another one. The clock on the wall keeps its own time. Leaves come down and nobody counts them. There is
    bread on the shelf and milk in the jug. Some people walk, and others stay where they are. The hill looks
    the same from either side. Evening comes, the lamps are lit, and it is quiet again.
    """
)

# {a} is an adjective, {n} a noun
PATTERNS = """
For a long time the {n} was thought to be {a}, and few people asked why.
When the {n} came back from the {n}, everything looked {a} to it.
There is a difference between a {a} {n} and one that only seems {a}.
Most of what we know about the {n} was written down by a {n} who had never seen one.
The {n} is not the problem; the problem is that nobody wants a {a} {n}.
I once asked a {n} about this, and the answer was more {a} than I had hoped.
If you begin with a {n}, you will sooner or later need a {n} as well.
It took them years to see that a {a} {n} costs less than a {a} one.
People who work with a {n} all day learn to be {a}.
At first the idea of a {n} without a {n} seems {a}.
What makes a {n} {a} is often the {n} beside it.
A good {n} does one thing, and a {a} one does it well.
The best {n} I ever saw belonged to a {n}, and it was neither {a} nor {a}.
So the {n} stayed where it was, {a} and a little {a}.
You can tell a {a} {n} by the way it treats a {n}.
We tried the {n} first, then the {n}, and in the end the {a} way won.
Every {n} has its {n}, but only the {a} ones talk about it.
By the time the {n} was ready, the {n} had gone and the room was {a}.
It is hard to explain a {n} to someone who has only met the {a} kind.
Why should a {n} be {a} at all?
My own view is that the {n} matters less than the {n}.
In those days a {n} was {a}, which was an advantage.
The lesson of the {a} {n} is simple: never trust a {n} you cannot carry.
Half of them wanted a {n}; the other half were too {a} to say.
"""
PROSE_SENTENCES = 3000
BEFORE_VOWEL = re.compile(r"\b([Aa])(?= (?:[aeio]|u(?!ni[^n]|s)))")


@cache
def made_prose() -> Haystack:
    """Prose whose sentences differ; about 50,000 tokens, then it repeats."""
    draws, patterns = Draws("prose"), PATTERNS.strip().splitlines()
    words = {"a": ADJECTIVES, "n": NOUNS}

    def sentence() -> str:
        filled = re.sub("{(.)}", lambda slot: draws.chosen(words[slot[1]]), draws.chosen(patterns))
        return BEFORE_VOWEL.sub(r"\1n", filled)

    return Haystack(" ".join(sentence() for _ in range(PROSE_SENTENCES)))


def distinct(candidates: Iterable[str], text: Haystack = NOISE) -> Iterator[str]:
    """The candidates without repetitions and without those that occur in `text`."""
    seen: set[str] = set()
    for candidate in candidates:
        if candidate not in seen and not text.holds(candidate):
            seen.add(candidate)
            yield candidate
