"""Texts of which a part is to be repeated word for word: lines, a function, a paragraph; their scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import count, islice

from lazyllm.evaluation.generated.draws import Draws, file_text, names
from lazyllm.evaluation.generated.kinds import Draft, Spec

LINES, SENTENCES = 5, 4  # lines that are asked for; sentences of a paragraph
FEW_WORDS = 5  # that name a paragraph


def quoted_lines(spec: Spec) -> Draft:
    """Numbered lines, LINES of which are to be repeated; its size is the number of the others. The first line
    has such a number that those asked for have theirs at any size."""
    sentences = spec.prose.sentences
    start, number = spec.draws.below(len(sentences)), 1000 + spec.draws.below(8000)

    def lines(first: int, end: int) -> str:
        numbers = range(first, end)
        return "\n".join(f"{line}: {sentences[(start + line) % len(sentences)]}" for line in numbers)

    def context(size: int) -> str:
        before = round(size * spec.depth / 100)
        return lines(number - before, number - before + size + LINES)

    question = f"Repeat the lines {number} to {number + LINES - 1}, each with its number."
    return Draft(question, [lines(number, number + LINES)], context, 1)


def quoted_paragraph(spec: Spec) -> Draft:
    """Paragraphs of SENTENCES lines of a sentence each, one of which is to be repeated."""
    sentences = spec.prose.sentences
    start = spec.draws.below(len(sentences))

    def paragraphs() -> Iterator[str]:
        for first in count(start, SENTENCES):
            yield "\n".join(sentences[(first + line) % len(sentences)] for line in range(SENTENCES))

    beginning = " ".join(next(paragraphs()).split()[:FEW_WORDS])
    question = f'Repeat the paragraph that begins with "{beginning}", word for word.'
    return quoted_part(spec, question, paragraphs, "\n\n")


def quoted_function(spec: Spec) -> Draft:
    """Functions in Python, one of which is to be repeated."""

    def functions() -> Iterator[str]:
        return (function(name, spec.draws.fork(name)) for name in identifiers(spec.draws.fork("functions")))

    name = next(identifiers(spec.draws.fork("functions")))
    return quoted_part(spec, f"Repeat the function {name}, line by line.", functions, "\n\n\n")


def quoted_part(spec: Spec, question: str, parts: Callable[[], Iterator[str]], between: str) -> Draft:
    """A text of parts, the first of which is asked for and stands at its depth; its size is the number of the
    others."""
    asked = next(parts())

    def context(size: int) -> str:
        texts = [*islice(parts(), 1, 1 + size)]
        texts.insert(round(size * spec.depth / 100), asked)
        return between.join(texts)

    return Draft(question, [asked], context, 1)


def identifiers(draws: Draws) -> Iterator[str]:
    """Distinct names such as calm_harbor."""
    return (name.replace("-", "_") for name in names(draws))


def function(name: str, draws: Draws) -> str:
    first, second = islice(identifiers(draws), 2)
    body = draws.chosen(file_text("code").split("\n\n")).replace("{first}", first).replace("{second}", second)
    body = re.sub("{number}", lambda _: str(2 + draws.below(998)), body)
    return f"def {name}({first}, {second}):\n{body}"


def quote_score(prediction: str, answers: Sequence[str]) -> dict[str, float]:
    return {"score": lines_right(prediction, answers[0]), "similarity": similarity(prediction, answers[0])}


def lines_right(prediction: str, answer: str) -> float:
    """The share of the answer's lines that the prediction has, whole and in their order."""
    expected, found = ([line.strip() for line in text.strip().splitlines()] for text in (answer, prediction))
    matches = SequenceMatcher(None, expected, found, autojunk=False).get_matching_blocks()
    return sum(match.size for match in matches) / len(expected)


def similarity(prediction: str, answer: str) -> float:
    """Edit similarity from 0 to 1, of as many lines of the prediction as the answer has."""
    lines = "\n".join(prediction.strip().splitlines()[: len(answer.splitlines())])
    return SequenceMatcher(None, answer, lines, autojunk=False).ratio()
