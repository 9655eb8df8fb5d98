"""Points: what a sweep found out about each setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isnan, nan
from typing import Any

import numpy as np

from lazyllm.longbench.summary import DENSE, Interval, Speed, Summary
from lazyllm.methods import Method


@dataclass(frozen=True)
class Point:
    """One setting; an Interval has value, low and high, and nan is what was not measured.

    `changed_nothing`: on how many prompts. `score`: mean of the categories, 0 to 100. `kl`: from dense's
    distributions, in nats a token, mean over prompts. `agreement`: share of equal argmaxes. `ttft`: mean
    seconds. `speedup`: of the first token against dense, measured, ratio of sums, and `speedup_median` of
    ratios. `counted_speedup`: by counted operations.
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
        """What a Pareto front looks at: the score, or else the KL divergence below zero."""
        return self.score.value if self.scored else -self.kl.value

    @property
    def share(self) -> float:
        """Quality from 0 to 1, what `best` looks at: score / 100, or else the share of equal argmaxes."""
        return self.score.value / 100 if self.scored else self.agreement.value

    def row(self) -> dict[str, Any]:
        """Of a table: an interval is three columns; what was not measured is left out."""
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
            agreement=summary.pooled(setting, "agreement") if kl else unknown,
            ttft=float(np.mean([row["timing"]["ttft"] for row in rows])) if rows else nan,
            speedup=speed.of_sums,
            speedup_median=speed.median,
            counted_speedup=counted_speedup(summary, setting),
            computed=summary.average(setting, "computed"),
            reached_top=summary.average(setting, "reached_top"),
        )


def counted_speedup(summary: Summary, setting: str) -> float:
    """Dense's counted operations over the setting's, on the items that both have; nan if not counted."""
    by_setting: dict[str, dict[tuple[str, str], int]] = {setting: {}, DENSE: {}}
    for row in summary.rows:
        if row["setting"] in by_setting and row["flops"] is not None:
            by_setting[row["setting"]][row["dataset"], row["item"]] = row["flops"]
    ours, dense = by_setting[setting], by_setting[DENSE]
    common = ours.keys() & dense.keys()
    return sum(dense[key] for key in common) / sum(ours[key] for key in common) if common else nan


def front(several: Sequence[Point]) -> list[Point]:
    """Those that no other beats in one of quality and speedup and equals or beats in both; slowest first."""
    known = [one for one in several if not (isnan(one.quality) or isnan(one.speedup))]

    def beaten(one: Point) -> bool:
        return any(
            other.quality >= one.quality
            and other.speedup >= one.speedup
            and (other.quality, other.speedup) != (one.quality, one.speedup)
            for other in known
        )

    return sorted((one for one in known if not beaten(one)), key=lambda one: one.speedup)
