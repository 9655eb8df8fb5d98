"""Early stop: a setting that a paired test finds worse than one at least as fast does not run to the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log, sqrt

import numpy as np

from lazyllm.searching.prompts import Result
from lazyllm.searching.study import LEAST_KL, Record

EVERY = 3  # prompts between two tests


def rival_of(speedup: float, records: Iterable[Record]) -> Record | None:
    """The finished setting with the least loss among those with at least this speedup, to two decimals."""
    as_fast = [one for one in records if one.done and one.shown_speedup >= round(speedup, 2)]
    return min(as_fast, key=lambda one: one.loss, default=None)


def is_worse(results: Sequence[Result], rival: Record) -> bool:
    """Whether it diverges more on the same prompts: in the mean, and typically by a factor that is above 1 by
    more than its standard error. The factor varies less between prompts than the difference; the mean
    counts. A stricter test stops fewer good settings, but tries fewer."""
    pairs = list(zip(results, rival.results, strict=False))
    if sum(mine.kl - other.kl for mine, other in pairs) <= 0:
        return False
    ratios = np.array([log(max(mine.kl, LEAST_KL) / max(other.kl, LEAST_KL)) for mine, other in pairs])
    return bool(ratios.mean() > ratios.std(ddof=1) / sqrt(len(ratios)))
