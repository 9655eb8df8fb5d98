"""Texts of which a part is to be repeated word for word: lines, a function, a paragraph; their scores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import partial
from itertools import count, islice

from lazyllm.evaluation.generated.draws import Draws, file_text, names
from lazyllm.evaluation.generated.kinds import Draft, Kind, Spec

LINES, SENTENCES = 5, 4  # lines that are asked for; sentences of a paragraph
FEW_WORDS = 5  # that name a paragraph


def placed(part: str, others: Iterable[str], depth: float, between: str) -> str:
    """A text of parts, with `part` among the others at its depth in percent."""
    parts = [*others]
    parts.insert(round(len(parts) * depth / 100), part)
    return between.join(parts)


def paragraphs(sentences: Sequence[str], start: int) -> Iterator[str]:
    """Paragraphs of SENTENCES lines of a sentence each, from sentence `start` on, without end."""
    for first in count(start, SENTENCES):
        yield "\n".join(sentences[(first + line) % len(sentences)] for line in range(SENTENCES))


def identifiers(draws: Draws) -> Iterator[str]:
    """Distinct names such as calm_harbor."""
    return (name.replace("-", "_") for name in names(draws))


def functions(draws: Draws) -> Iterator[tuple[str, str]]:
    """Names and texts of distinct functions in Python."""
    for name in identifiers(draws.fork("functions")):
        yield name, function(name, draws.fork(name))


def function(name: str, draws: Draws) -> str:
    first, second = islice(identifiers(draws), 2)
    body = draws.chosen(file_text("code").split("\n\n")).replace("{first}", first).replace("{second}", second)
    body = re.sub("{number}", lambda _: str(2 + draws.below(998)), body)
    return f"def {name}({first}, {second}):\n{body}"


# ---- the kinds -----------------------------------------------------------------------------------


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

    return Draft(
        f"Repeat the lines {number} to {number + LINES - 1}, each with its number.",
        "",
        [lines(number, number + LINES)],
        context,
        1,
    )


def quoted_paragraph(spec: Spec) -> Draft:
    """Paragraphs, one of which is to be repeated; its size is the number of the others."""
    sentences = spec.prose.sentences
    parts = partial(paragraphs, sentences, spec.draws.below(len(sentences)))
    asked = next(parts())
    beginning = " ".join(asked.split()[:FEW_WORDS])
    return Draft(
        f'Repeat the paragraph that begins with "{beginning}", word for word.',
        "",
        [asked],
        lambda size: placed(asked, islice(parts(), 1, 1 + size), spec.depth, "\n\n"),
        1,
    )


def quoted_function(spec: Spec) -> Draft:
    """Functions in Python, one of which is to be repeated; its size is the number of the others."""
    name, asked = next(functions(spec.draws))
    return Draft(
        f"Repeat the function {name}, line by line.",
        "",
        [asked],
        lambda size: placed(
            asked, (text for _, text in islice(functions(spec.draws), 1, 1 + size)), spec.depth, "\n\n\n"
        ),
        1,
    )


QUOTES = (
    Kind("quote_lines", "Quotes", 160, quoted_lines),
    Kind("quote_paragraph", "Quotes", 160, quoted_paragraph),
    Kind("quote_function", "Quotes", 160, quoted_function),
)

# ---- their scores --------------------------------------------------------------------------------


def lines_right(prediction: str, answer: str) -> float:
    """The share of the answer's lines that the prediction has, whole and in their order."""
    expected, found = ([line.strip() for line in text.strip().splitlines()] for text in (answer, prediction))
    matches = SequenceMatcher(None, expected, found, autojunk=False).get_matching_blocks()
    return sum(match.size for match in matches) / len(expected)


def similarity(prediction: str, answer: str) -> float:
    """Edit similarity from 0 to 1, of as many lines of the prediction as the answer has."""
    lines = "\n".join(prediction.strip().splitlines()[: len(answer.splitlines())])
    return SequenceMatcher(None, answer, lines, autojunk=False).ratio()
