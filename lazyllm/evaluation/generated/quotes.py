"""Texts of which a part is to be repeated word for word: lines, a function, a paragraph; and its score."""

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import count, islice

from lazyllm.evaluation.generated.kinds import Draft, Spec
from lazyllm.evaluation.generated.material import Draws, file_text, names, prose

LINES, SENTENCES = 5, 4  # lines that are asked for; sentences of a paragraph
FEW_WORDS = 5  # that name a paragraph


def quoted_lines(spec: Spec) -> Draft:
    """Numbered lines, LINES of which are to be repeated; its size is the number of the others. Lines are
    numbered so that those asked for keep their numbers at any size."""
    sentences = prose().sentences
    start, number = spec.draws.below(len(sentences)), 1000 + spec.draws.below(8000)

    def lines(first: int, n_lines: int) -> str:
        numbers = range(first, first + n_lines)
        return "\n".join(f"{line}: {sentences[(start + line) % len(sentences)]}" for line in numbers)

    def context(size: int) -> str:
        return lines(number - round(size * spec.depth / 100), size + LINES)

    question = f"Repeat the lines {number} to {number + LINES - 1}, each with its number."
    return Draft(question, [lines(number, LINES)], context, 1)


def quoted_paragraph(spec: Spec) -> Draft:
    """Paragraphs of SENTENCES lines of a sentence each, one of which is to be repeated."""
    sentences = prose().sentences
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
        return (function(name, spec.draws.fork(name)) for name in names(spec.draws.fork("functions"), "_"))

    name = next(names(spec.draws.fork("functions"), "_"))
    return quoted_part(spec, f"Repeat the function {name}, line by line.", functions, "\n\n\n")


def quoted_part(spec: Spec, question: str, parts: Callable[[], Iterator[str]], between: str) -> Draft:
    """A text of parts, the first of which is asked for and stands at its depth; its size is the number of the
    others."""

    def context(size: int) -> str:
        asked, *texts = islice(parts(), 1 + size)
        texts.insert(round(size * spec.depth / 100), asked)
        return between.join(texts)

    return Draft(question, [next(parts())], context, 1)


def function(name: str, draws: Draws) -> str:
    first, second = islice(names(draws, "_"), 2)
    body = draws.chosen(file_text("code.txt").split("\n\n")).replace("{first}", first)
    body = re.sub("{number}", lambda _: str(2 + draws.below(998)), body.replace("{second}", second))
    return f"def {name}({first}, {second}):\n{body}"


def quote_score(prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """`score`: the share of the answer's lines that the prediction has, whole and in their order;
    `similarity`: by edits, of as many lines of the prediction as the answer has."""
    (answer,) = answers
    expected, found = ([line.strip() for line in text.strip().splitlines()] for text in (answer, prediction))
    matches = SequenceMatcher(None, expected, found, autojunk=False).get_matching_blocks()
    lines = "\n".join(prediction.strip().splitlines()[: len(expected)])
    return {
        "score": sum(match.size for match in matches) / len(expected),
        "similarity": SequenceMatcher(None, answer, lines, autojunk=False).ratio(),
    }
