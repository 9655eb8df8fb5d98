"""LongBench's scores: 0 to 1 for an item, 0 to 100 for a data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lazyllm.evaluation.longbench import datasets, metrics
from lazyllm.evaluation.options import EDIT_SIM

Texts = Sequence[str]
ANY_ANSWER = "Paragraph 1 段落1"  # a valid answer for every metric


def _check_list(value: object, what: str) -> None:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{what} must be a list, not {value!r:.80}")
    if not value:
        raise ValueError(f"{what} must not be empty")


def _check_texts(texts: Sequence[object], what: str) -> None:
    _check_list(texts, what)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{what} must hold strings only, not {text!r:.80}")


def _metric(data: datasets.DataSet, all_classes: Texts | None, edit_sim: str) -> Callable[[str, str], float]:
    """The metric of the data set, for a prediction and an answer."""
    if edit_sim not in metrics.EDIT_SIMS:
        raise ValueError(f"edit_sim must be {' or '.join(metrics.EDIT_SIMS)}, not {edit_sim!r}")
    metric: Callable[..., float] = getattr(metrics, data.metric)
    if data.metric == "code_similarity":
        return partial(metric, edit_sim=edit_sim)
    if data.metric == "classification":
        if all_classes is None:
            raise ValueError(f"{data.name} needs all_classes, the list of its labels")
        _check_texts(all_classes, "all_classes")
        return partial(metric, all_classes=all_classes)
    return metric


def check_scorer(dataset: str, edit_sim: str) -> None:
    """Raises the error that every score would raise: an unknown option, a missing package."""
    score_item(dataset, ANY_ANSWER, [ANY_ANSWER], [ANY_ANSWER], edit_sim)


def score_item(
    dataset: str,
    pred: str,
    answers: Texts,
    all_classes: Texts | None = None,
    edit_sim: str = EDIT_SIM,
    where: str = "",
) -> float:
    """The score of one prediction, from 0 to 1: its best score against one of the answers."""
    data = datasets.dataset(dataset)
    metric = _metric(data, all_classes, edit_sim)
    if not isinstance(pred, str):
        raise TypeError(f"the prediction{where} must be a string, not {pred!r:.80}")
    _check_texts(answers, f"the list of answers{where}")
    if data.first_line:
        pred = pred.lstrip("\n").split("\n")[0]
    return max(metric(pred, answer) for answer in answers)


def score(
    dataset: str,
    preds: Texts,
    answers: Sequence[Texts],
    all_classes: Texts | None = None,
    edit_sim: str = EDIT_SIM,
) -> float:
    """The data set's score, from 0 to 100, rounded like the official scorer's.

    `answers` has one list per prediction. `edit_sim`, for code, is "difflib", as with the benchmark's own
    requirements, or "levenshtein".
    """
    _check_list(preds, "preds")
    _check_list(answers, "answers")
    if len(preds) != len(answers):
        raise ValueError(f"preds and answers must be equally many, not {len(preds)} and {len(answers)}")
    total = 0.0
    for index, (pred, accepted) in enumerate(zip(preds, answers, strict=True)):
        total += score_item(dataset, pred, accepted, all_classes, edit_sim, f" of item {index}")
    return round(100 * total / len(preds), 2)
