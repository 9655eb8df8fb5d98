"""Points: the measurements of each setting of a sweep or search, as table, picture and Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from lazyllm.evaluation.report import cell
from lazyllm.evaluation.summary import DENSE_LABEL, Interval, Speed, Summary, interval, mean
from lazyllm.method import Method
from lazyllm.pictures.quality import COUNTED_AXIS, KL_AXIS, MEASURED_AXIS, SCORE_AXIS, Dot, plot_scores
from lazyllm.support.optional import package
from lazyllm.support.tables import Table

if TYPE_CHECKING:
    import pandas

TITLE = "Settings: quality [95 %], speed against dense"
QUALITY_AXES = {"score": SCORE_AXIS, "kl": KL_AXIS}
SPEEDUP_AXES = {"ttft_speedup": MEASURED_AXIS, "counted_speedup": COUNTED_AXIS}
UNKNOWN = Interval(nan, nan, nan)


@dataclass(frozen=True, repr=False)
class Point:
    """One setting. An Interval has value, low and high; nan stands for a quantity that was not measured.

    `changed_nothing`: number of prompts of which no token was pruned. `score`: mean of the categories, 0 to
    100. `kl`: divergence from dense in nats per token, mean over prompts. `agreement`: share of equal
    argmaxes. `ttft`: mean seconds to the first token. `ttft_speedup`: of the first token against dense, as a
    ratio of summed times; `ttft_speedup_median`: median of the ratios; times are of one environment.
    `counted_speedup`: by counted operations.
    """

    setting: str
    pruning: Method
    prompts: int
    failed: int = 0
    changed_nothing: int = 0
    score: Interval = UNKNOWN
    kl: Interval = UNKNOWN
    kl_median: float = nan
    agreement: Interval = UNKNOWN
    ttft: float = nan
    ttft_speedup: float = nan
    ttft_speedup_median: float = nan
    counted_speedup: float = nan
    computed: float = nan
    reached_top: float = nan

    def __repr__(self) -> str:
        """The point as a table of one row."""
        return Frame([self]).table.text()

    @property
    def quality(self) -> float:
        """Quality on the Pareto front, larger is better: the score, or minus the divergence."""
        return -self.kl.value if isnan(self.score.value) else self.score.value

    @property
    def share(self) -> float:
        """Quality for `best`, from 0 to 1: score / 100, or the share of equal argmaxes."""
        return self.agreement.value if isnan(self.score.value) else self.score.value / 100


def points(summary: Summary, methods: Mapping[str, Method]) -> Iterator[Point]:
    """The point of each setting, by the rows of a summary."""
    for setting, method in methods.items():
        kl, speed = summary.values(setting, "kl"), summary.speed(setting, "ttft")
        operations = summary.paired(setting, lambda row: row["flops"]).sum(axis=1)
        yield Point(
            setting=setting,
            pruning=method,
            prompts=len(summary.of(setting)),
            failed=sum(row["setting"] == setting for row in summary.failed),
            changed_nothing=int(summary.values(setting, "changed_nothing").sum()),
            score=summary.mean(setting),
            kl=interval([[kl]], 0),
            kl_median=float(np.median(kl)) if len(kl) else nan,
            agreement=interval([[summary.values(setting, "agreement")]], 0, 1),
            ttft=mean([row["timing"]["ttft"] for row in summary.timed(setting)]),
            ttft_speedup=speed.of_sums,
            ttft_speedup_median=speed.median,
            counted_speedup=float(operations[0] / operations[1]) if operations.all() else nan,
            computed=mean(summary.values(setting, "computed")),
            reached_top=mean(summary.values(setting, "reached_top")),
        )


def front(points: Sequence[Point], speedup: str = "ttft_speedup") -> list[Point]:
    """The Pareto front, slowest first: points to which no other is equal or better in quality and speedup
    and better in one of them. `speedup` names the field of it, one of SPEEDUP_AXES."""

    def beats(other: Point, point: Point) -> bool:
        faster: float = getattr(other, speedup) - getattr(point, speedup)
        better = other.quality - point.quality
        return min(better, faster) >= 0 < max(better, faster)

    measured = [point for point in points if not isnan(point.quality + getattr(point, speedup))]
    unbeaten = [point for point in measured if not any(beats(other, point) for other in measured)]
    return sorted(unbeaten, key=lambda point: getattr(point, speedup))


def plot_points(points: Sequence[Point], title: str, file: Path, speedup: str = "ttft_speedup") -> Path:
    """Draws quality against a speedup with the Pareto front; needs matplotlib."""
    quality = "kl" if all(isnan(point.score.value) for point in points) else "score"
    dots, on_front = (
        [Dot(point.setting, getattr(point, speedup), *getattr(point, quality)) for point in part]
        for part in (points, front(points, speedup))
    )
    return plot_scores(dots, DENSE_LABEL, file, title, (SPEEDUP_AXES[speedup], QUALITY_AXES[quality]), on_front)


# ---- tables ----------------------------------------------------------------------------------------


COLUMNS: dict[str, Callable[[Point], str]] = {
    "setting": lambda point: point.setting,
    "score": lambda point: cell(point.score),
    "KL": lambda point: cell(point.kl, ".4f"),
    "median KL": lambda point: cell(point.kl_median, ".4f"),
    "equal argmaxes": lambda point: cell(point.agreement, ".4f"),
    "TTFT, s": lambda point: cell(point.ttft, ".3g"),
    "TTFT speedup": lambda point: str(Speed(point.ttft_speedup, point.ttft_speedup_median)),
    "counted speedup": lambda point: cell(point.counted_speedup),
    "computed": lambda point: cell(point.computed, ".1%"),
    "reached the top": lambda point: cell(point.reached_top, ".1%"),
    "prompts": lambda point: str(point.prompts),
    "changed nothing": lambda point: str(point.changed_nothing or ""),
    "failed": lambda point: str(point.failed or ""),
}


class Frame:
    """Points in order, indexed by number or by setting."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = tuple(points)

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def __getitem__(self, key: SupportsIndex | str) -> Point:
        if not isinstance(key, str):
            return self._points[key]
        by_setting = {point.setting: point for point in self}
        if key not in by_setting:
            raise KeyError(f"{key!r} is not among the settings {', '.join(by_setting)}")
        return by_setting[key]

    @property
    def table(self) -> Table:
        """The points as rows; columns without a measurement are left out."""
        columns = {head: [text_of(point) for point in self] for head, text_of in COLUMNS.items()}
        filled = {name: cells for name, cells in columns.items() if any(cells)}
        return Table(TITLE, list(filled), list(zip(*filled.values(), strict=True)))

    def to_frame(self) -> pandas.DataFrame:
        """One row per setting, unrounded; needs pandas. An interval has three columns; columns without
        a measurement are left out. Settings are as JSON, which `pruning=` takes."""
        rows: list[dict[str, Any]] = []
        for point in self:
            row: dict[str, Any] = {}
            for name, value in vars(point).items():
                bounds = value if isinstance(value, Interval) else [value]
                row |= zip((name, f"{name}_low", f"{name}_high"), bounds, strict=False)
            rows.append({**row, "pruning": point.pruning.to_json()})
        frame: pandas.DataFrame = package("pandas", "to_frame", "plots").DataFrame(rows)
        return frame.dropna(axis="columns", how="all")

    def __repr__(self) -> str:
        return self.table.text()

    def _repr_html_(self) -> str:
        return self.table.html()
