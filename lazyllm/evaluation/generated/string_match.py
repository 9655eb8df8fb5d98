"""String match, RULER's score: the share of the expected strings in a prediction, or any of them."""

from __future__ import annotations

from collections.abc import Sequence


def string_match(prediction: str, answers: Sequence[str], any_answer: bool = False) -> float:
    """The share of `answers` that occur in `prediction`, from 0 to 1, ignoring case.

    With `any_answer` one of them is enough for 1.
    """
    if not isinstance(prediction, str):
        raise TypeError(f"the prediction must be a string, not {prediction!r:.80}")
    if isinstance(answers, str | bytes) or not isinstance(answers, Sequence):
        raise TypeError(f"answers must be a list of strings, not {answers!r:.80}")
    if not answers:
        raise ValueError("answers must not be empty")
    for answer in answers:
        if not isinstance(answer, str):
            raise TypeError(f"answers must hold strings only, not {answer!r:.80}")
        if not answer:
            raise ValueError("answers must not hold an empty string, which occurs in every prediction")
    lowered = prediction.lower()
    found = sum(answer.lower() in lowered for answer in answers)
    return float(found > 0) if any_answer else found / len(answers)
