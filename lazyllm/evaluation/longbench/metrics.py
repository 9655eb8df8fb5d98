"""LongBench's metrics: scores of a prediction against an answer, 0 to 1, equal to the official code's."""

from __future__ import annotations

import logging
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from difflib import SequenceMatcher
from functools import cache, partial
from importlib import metadata
from threading import Thread
from typing import Any

from lazyllm.support.optional import package

ROUGE_VERSION = "1.0.1"
OFFICIAL_RECURSION_LIMIT = 1000
CODE_MARKS = ("`", "#", "//")
PUNCTUATION = frozenset(string.punctuation)
# the official code's set: no fullwidth full stop, no opening double angle bracket, no middle dot
CHINESE_PUNCTUATION = PUNCTUATION | frozenset(
    "！＂＃＄％＆＇（）＊＋，－／：；＜＝＞？＠［＼］＾＿｀｛｜｝～｟｠｢｣､"  # noqa: RUF001
    "、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏｡"  # noqa: RUF001
)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NUMBER = re.compile(r"\d+")


_needed = partial(package, what="this metric of LongBench", extra="longbench")


def _without(text: str, marks: frozenset[str]) -> str:
    return "".join(sign for sign in text.lower() if sign not in marks)


def _words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", _without(text, PUNCTUATION)).split()


@cache
def _segmenter() -> Callable[[str], list[str]]:
    jieba = _needed("jieba")
    jieba.setLogLevel(logging.WARNING)
    lcut: Callable[[str], list[str]] = jieba.Tokenizer().lcut
    return lcut


def _chinese_words(text: str) -> list[str]:
    bare = ("".join(_without(segment, CHINESE_PUNCTUATION).split()) for segment in _segmenter()(text))
    return [word for word in bare if word]


def _overlap(prediction: list[str], answer: list[str]) -> float:
    shared = (Counter(prediction) & Counter(answer)).total()
    if shared == 0:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(answer)
    return 2 * precision * recall / (precision + recall)


def f1(prediction: str, answer: str) -> float:
    """F1 of the common words. ASCII punctuation is deleted without leaving a space, then articles."""
    return _overlap(_words(prediction), _words(answer))


def f1_zh(prediction: str, answer: str) -> float:
    """F1 of the common segments by jieba, without punctuation and white space."""
    return _overlap(_chinese_words(prediction), _chinese_words(answer))


@cache
def _rouge() -> Any:
    rouge = _needed("rouge")
    if (version := metadata.version("rouge")) != ROUGE_VERSION:
        needed = f"rouge {ROUGE_VERSION}, not {version}: pip install rouge=={ROUGE_VERSION}"
        raise ImportError(f"LongBench's ROUGE is that of {needed}")
    return rouge.Rouge(metrics=["rouge-l"])


def rouge(prediction: str, answer: str) -> float:
    """F of ROUGE-L by the package rouge 1.0.1; 0 for texts without a sentence or with too long ones.

    The package recurses once per step through a pair of sentences, and its RecursionError is a score of 0. It
    runs on the stack that a script has under Python's default recursion limit.
    """
    outcome: Future[float] = Future()
    get_scores = _rouge().get_scores

    def run(spare_frames: int) -> None:
        if spare_frames > 0:
            return run(spare_frames - 1)
        try:
            scores = get_scores([prediction], [answer], True)
            return outcome.set_result(float(scores["rouge-l"]["f"]))
        except (ValueError, RecursionError):
            return outcome.set_result(0.0)
        except BaseException as error:
            return outcome.set_exception(error)

    spare_frames = 1 + sys.getrecursionlimit() - OFFICIAL_RECURSION_LIMIT
    Thread(target=run, args=(spare_frames,), daemon=True).start()
    return outcome.result()


def rouge_zh(prediction: str, answer: str) -> float:
    """`rouge` of jieba's segments joined by spaces; a sentence ends at an ASCII full stop only."""
    segments = _segmenter()
    return rouge(" ".join(segments(prediction)), " ".join(segments(answer)))


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """1 / number of classes that occur in the prediction, if the answer is among them; else 0."""
    classes = [name for name in all_classes if name in prediction]
    for name in classes:  # removal during iteration skips the next name, as in the official code
        if name != answer and name in answer:
            classes.remove(name)
    return 1.0 / len(classes) if answer in classes else 0.0


def count(prediction: str, answer: str) -> float:
    """The share of the numbers in the prediction that equal the answer."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str, label: str = "Paragraph ") -> float:
    """The share of the numbers in the prediction that equal the number after `label` in the answer."""
    number = re.search(rf"{label}(\d+)", answer)
    if number is None:
        raise ValueError(f"an answer must contain {label!r} and a number, not {answer!r}")
    return count(prediction, number[1])


retrieval_zh = partial(retrieval, label="段落")


EDIT_SIMS: Mapping[str, Callable[[str, str], float]] = {
    "difflib": lambda line, answer: SequenceMatcher(None, line, answer).ratio(),
    "levenshtein": lambda line, answer: _needed("rapidfuzz").distance.Indel.normalized_similarity(
        line, answer
    ),
}


def code_similarity(prediction: str, answer: str, edit_sim: str) -> float:
    """Edit similarity, rounded to 0.01, of the answer and the first line without CODE_MARKS."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in CODE_MARKS)), "")
    return round(100 * EDIT_SIMS[edit_sim](line, answer)) / 100
