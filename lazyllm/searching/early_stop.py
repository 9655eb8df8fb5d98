"""Early stop: a setting that a paired test finds worse than one at least as fast does not run to the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lazyllm.evaluation.intervals import interval
from lazyllm.searching.prompts import Result
from lazyllm.searching.study import Record

EVERY = 3  # prompts between two tests


def rival_of(speedup: float, records: Iterable[Record]) -> Record | None:
    """The finished setting with the least loss among those with at least this speedup."""
    as_fast = [one for one in records if one.done and one.speedup >= speedup]
    return min(as_fast, key=lambda one: one.loss, default=None)


def is_worse(results: Sequence[Result], rival: Record) -> bool:
    """Whether the 95 % interval of the mean difference in divergence, on the same prompts, is above 0."""
    pairs = zip(results, rival.results, strict=False)
    differences = np.array([mine.kl - other.kl for mine, other in pairs])
    return interval(float(differences.mean()), [[differences]]).low > 0
