"""Point: the measurements of one setting in a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isnan, nan
from typing import Any

import numpy as np

from lazyllm.evaluation.intervals import Interval
from lazyllm.evaluation.summary import Speed, Summary
from lazyllm.method import Method


@dataclass(frozen=True)
class Point:
    """One setting. An Interval has value, low and high; nan stands for a quantity that was not measured.

    `changed_nothing`: number of prompts of which no token was pruned. `score`: mean of the categories, 0 to
    100. `kl`: divergence from dense in nats per token, mean over prompts. `agreement`: share of equal
    argmaxes. `ttft`: mean seconds to the first token. `speedup`: of the first token against dense, as a ratio
    of summed times; `speedup_median`: median of the ratios; times are of one environment. `counted_speedup`:
    by counted operations.
    """

    setting: str
    pruning: Method
    prompts: int
    failed: int
    changed_nothing: int
    score: Interval
    kl: Interval
    kl_median: float
    agreement: Interval
    ttft: float
    speedup: float
    speedup_median: float
    counted_speedup: float
    computed: float
    reached_top: float

    @property
    def scored(self) -> bool:
        return not isnan(self.score.value)

    @property
    def quality(self) -> float:
        """Quality on the Pareto front, larger is better: the score, or else the negative KL divergence."""
        return self.score.value if self.scored else -self.kl.value

    @property
    def share(self) -> float:
        """Quality for `best`, from 0 to 1: score / 100, or else the share of equal argmaxes."""
        return self.score.value / 100 if self.scored else self.agreement.value

    def row(self) -> dict[str, Any]:
        """A row of a table. An interval takes three columns; unmeasured quantities are left out."""
        flat: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Interval):
                if not isnan(value.value):
                    flat |= {field.name: value.value}
                    flat |= {f"{field.name}_low": value.low, f"{field.name}_high": value.high}
            elif field.name != "kl_median" or not isnan(value):
                flat[field.name] = value
        return flat


def points(summary: Summary, methods: Mapping[str, Method]) -> Iterator[Point]:
    for setting, method in methods.items():
        rows = [row for row in summary.rows if row["setting"] == setting]
        kl = [row["kl"] for row in rows if "kl" in row]
        unknown = Interval(nan, nan, nan)
        speed = summary.speed(setting, "ttft") or Speed(nan, nan)
        yield Point(
            setting=setting,
            pruning=method,
            prompts=len(rows),
            failed=sum(row["setting"] == setting for row in summary.failed),
            changed_nothing=summary.count(setting, "changed_nothing"),
            score=summary.mean(setting) if rows and "score" in rows[0] else unknown,
            kl=summary.pooled(setting, "kl") if kl else unknown,
            kl_median=float(np.median(kl)) if kl else nan,
            agreement=summary.pooled(setting, "agreement", 1.0) if kl else unknown,
            ttft=float(np.mean([row["timing"]["ttft"] for row in summary.timed(setting)])) if rows else nan,
            speedup=speed.of_sums,
            speedup_median=speed.median,
            counted_speedup=counted_speedup(summary, setting),
            computed=summary.average(setting, "computed"),
            reached_top=summary.average(setting, "reached_top"),
        )


def counted_speedup(summary: Summary, setting: str) -> float:
    """Dense's counted operations over the setting's, on common items; nan if not counted."""
    operations = summary.paired(setting, lambda row: row["flops"])
    return float(operations[0].sum() / operations[1].sum()) if operations else nan


def front(several: Sequence[Point]) -> list[Point]:
    """The Pareto front, slowest first: points to which no other is equal or better in quality and speedup
    and better in one of them."""
    known = [one for one in several if not (isnan(one.quality) or isnan(one.speedup))]
    places = {(one.quality, one.speedup) for one in known}

    def beaten(quality: float, speedup: float) -> bool:
        return any(q >= quality and s >= speedup and (q, s) != (quality, speedup) for q, s in places)

    best = (one for one in known if not beaten(one.quality, one.speedup))
    return sorted(best, key=lambda one: one.speedup)
