"""String match: the share of the expected strings that a prediction holds, as RULER scores its tasks."""

from __future__ import annotations

from collections.abc import Sequence


def string_match(prediction: str, answers: Sequence[str]) -> float:
    """The share of `answers` found in `prediction`, from 0 to 1, whatever the case of their letters."""
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
            raise ValueError("answers must not hold an empty string, which every prediction has")
    lowered = prediction.lower()
    return sum(answer.lower() in lowered for answer in answers) / len(answers)
