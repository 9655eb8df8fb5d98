"""LongBench's scores: 0 to 1 for an item, 0 to 100 for a data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lazyllm.evaluation.longbench import datasets, metrics
from lazyllm.evaluation.options import EDIT_SIM
from lazyllm.support import checked

Texts = Sequence[str]


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
    answers: Texts,
    all_classes: Texts | None = None,
    edit_sim: str = EDIT_SIM,
    where: str = "",
) -> float:
    """The score of one prediction, from 0 to 1: its best score against one of the answers."""
    data = datasets.dataset(dataset)
    checked.choice(edit_sim, "edit_sim", [*metrics.EDIT_SIMS])
    metric: Callable[..., float] = getattr(metrics, data.metric)
    options: dict[str, Any] = {}
    if data.metric == "code_similarity":
        options["edit_sim"] = edit_sim
    if data.metric == "classification":
        _check_texts(all_classes, f"all_classes, the labels of {dataset},")
        options["all_classes"] = all_classes
    _check_texts(answers, f"the list of answers{where}")
    if data.first_line:
        pred = pred.lstrip("\n").split("\n")[0]
    return max(metric(pred, answer, **options) for answer in answers)


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
    _check_texts(preds, "preds")
    if len(preds) != len(answers):
        raise ValueError(f"preds and answers must be equally many, not {len(preds)} and {len(answers)}")
    scores = [
        score_item(dataset, pred, accepted, all_classes, edit_sim, f" of item {index}")
        for index, (pred, accepted) in enumerate(zip(preds, answers, strict=True))
    ]
    return round(100 * sum(scores) / len(preds), 2)
