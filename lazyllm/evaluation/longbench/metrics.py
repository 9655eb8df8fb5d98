"""LongBench's scores, equal to the official code's: 0 to 1 of a prediction, 0 to 100 of a data set."""

import inspect
import logging
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache, partial
from importlib import metadata
from typing import Any

from lazyllm.evaluation.longbench.datasets import dataset as dataset_of
from lazyllm.evaluation.options import EDIT_SIM
from lazyllm.support import checked
from lazyllm.support.optional import package

ROUGE_VERSION = "1.0.1"
OFFICIAL_FRAMES = 995
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

    The package recurses once per step through a pair of sentences, and a RecursionError scores 0. It gets as
    many frames as in a script under Python's default recursion limit.
    """
    get_scores, usual = _rouge().get_scores, sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + OFFICIAL_FRAMES)
    try:
        return float(get_scores([prediction], [answer], True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0
    finally:
        sys.setrecursionlimit(usual)


def rouge_zh(prediction: str, answer: str) -> float:
    """`rouge` of jieba's segments joined by spaces; a sentence ends at an ASCII full stop only."""
    return rouge(*(" ".join(_segmenter()(text)) for text in (prediction, answer)))


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


EDIT_SIMS: Mapping[str, Callable[[str, str], float]] = {
    "difflib": lambda line, answer: SequenceMatcher(None, line, answer).ratio(),
    "levenshtein": lambda line, answer: _needed("rapidfuzz").distance.Indel.normalized_similarity(line, answer),
}


def code_similarity(prediction: str, answer: str, edit_sim: str) -> float:
    """Edit similarity, rounded to 0.01, of the answer and the first line without CODE_MARKS."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in CODE_MARKS)), "")
    return round(100 * EDIT_SIMS[edit_sim](line, answer)) / 100


METRICS: Mapping[str, Callable[..., float]] = {
    **{metric.__name__: metric for metric in (f1, f1_zh, rouge, rouge_zh, classification, count, retrieval)},
    "retrieval_zh": partial(retrieval, label="段落"),
    "code_similarity": code_similarity,
}


# ---- scores --------------------------------------------------------------------------------------


def _check_texts(texts: object, what: str) -> None:
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise TypeError(f"{what} must be a list, not {texts!r:.80}")
    if not texts:
        raise ValueError(f"{what} must not be empty")
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{what} must hold strings only, not {text!r:.80}")


def score_item(
    dataset: str,
    pred: str,
    answers: Sequence[str],
    all_classes: Sequence[str] | None = None,
    edit_sim: str = EDIT_SIM,
    where: str = "",
) -> float:
    """The score of one prediction, from 0 to 1: its best score against one of the answers."""
    data = dataset_of(dataset)
    checked.choice(edit_sim, "edit_sim", [*EDIT_SIMS])
    options: dict[str, Any] = {}
    if data.metric == "code_similarity":
        options["edit_sim"] = edit_sim
    if data.metric == "classification":
        _check_texts(all_classes, f"all_classes, the labels of {dataset},")
        options["all_classes"] = all_classes
    _check_texts(answers, f"the list of answers{where}")
    if data.first_line:
        pred = pred.lstrip("\n").split("\n")[0]
    return max(METRICS[data.metric](pred, answer, **options) for answer in answers)


def score(
    dataset: str,
    preds: Sequence[str],
    answers: Sequence[Sequence[str]],
    all_classes: Sequence[str] | None = None,
    edit_sim: str = EDIT_SIM,
) -> float:
    """The data set's score, from 0 to 100, rounded like the official scorer's.

    `answers` has one list per prediction. `edit_sim`, for code, is "difflib", as with the benchmark's own
    requirements, or "levenshtein".
    """
    _check_texts(preds, "preds")
    if len(preds) != len(answers):
        raise ValueError(f"preds and answers must be equally many, not {len(preds)} and {len(answers)}")
    scores = [
        score_item(dataset, pred, accepted, all_classes, edit_sim, f" of item {index}")
        for index, (pred, accepted) in enumerate(zip(preds, answers, strict=True))
    ]
    return round(100 * sum(scores) / len(preds), 2)
