"""The text around the needles: noise, prose made by rule, or the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate, chain, cycle, islice
from pathlib import Path

from lazyllm.evaluation.generated.draws import Draws, file_text, vocabulary
from lazyllm.support.files import user_path

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)])\s+|\n\s*\n")  # noqa: RUF001 - quotation marks


class Haystack:
    """A text of repeated sentences, of any length."""

    def __init__(self, text: str) -> None:
        sentences = (" ".join(sentence.split()) for sentence in SENTENCE_END.split(text))
        self.sentences = [sentence for sentence in sentences if sentence]
        self.folded = " ".join(self.sentences).casefold()

    @classmethod
    def read(cls, folder: str | Path) -> Haystack:
        """Sentences of the .txt files in a folder, ordered by file name."""
        path = user_path(folder)
        if not path.is_dir():
            raise FileNotFoundError(f"prose: {path} is no folder; expected one with .txt files")
        texts = []
        for file in sorted(path.glob("*.txt")):
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"prose: {file} is not UTF-8 text: {error}") from None
        if not (haystack := cls("\n\n".join(texts))).sentences:
            raise ValueError(f"prose: {path} has no .txt file with text in it")
        return haystack

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


PROSE_SENTENCES = 3000
BEFORE_VOWEL = re.compile(r"\b([Aa])(?= (?:[aeio]|u(?!ni[^n]|s)))")


@cache
def noise() -> Haystack:
    """A few sentences of no interest, repeated."""
    return Haystack(file_text("noise"))


@cache
def made_prose() -> Haystack:
    """Prose whose sentences differ; about 50,000 tokens, then it repeats."""
    draws, patterns = Draws("prose"), file_text("patterns").splitlines()

    def sentence() -> str:
        pattern = draws.chosen(patterns)
        filled = re.sub("{(.+?)}", lambda slot: draws.chosen(vocabulary(slot[1])), pattern)
        return BEFORE_VOWEL.sub(r"\1n", filled)

    return Haystack(" ".join(sentence() for _ in range(PROSE_SENTENCES)))


def distinct(candidates: Iterable[str], text: Haystack | None = None) -> Iterator[str]:
    """The candidates without repetitions and without those that occur in `text`, or else in the noise."""
    folded, seen = (text or noise()).folded, set[str]()
    for candidate in candidates:
        if candidate not in seen and candidate.casefold() not in folded:
            seen.add(candidate)
            yield candidate
