"""Points: the measurements of each setting of a sweep, as a table and as a Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isnan, nan
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from lazyllm.evaluation.intervals import Interval
from lazyllm.evaluation.report import figure, with_interval
from lazyllm.evaluation.summary import Speed, Summary
from lazyllm.method import Method
from lazyllm.pruning import Pruning
from lazyllm.support.optional import package
from lazyllm.support.tables import Table

if TYPE_CHECKING:
    import pandas

TITLE = "Settings: quality [95 %], speed against dense"


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
        """A row of a table. An interval takes three columns; unmeasured qualities are left out."""
        flat: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Interval):
                names = (field.name, f"{field.name}_low", f"{field.name}_high")
                if not isnan(value.value):
                    flat |= zip(names, (value.value, value.low, value.high), strict=True)
            elif field.name != "kl_median" or not isnan(value):
                flat[field.name] = value
        return flat


def points(summary: Summary, methods: Mapping[str, Method]) -> Iterator[Point]:
    """The point of each setting, by the rows of a summary."""
    unknown = Interval(nan, nan, nan)
    for setting, method in methods.items():
        rows = [row for row in summary.rows if row["setting"] == setting]
        kl = [row["kl"] for row in rows if "kl" in row]
        speed = summary.speed(setting, "ttft") or Speed(nan, nan)
        operations = summary.paired(setting, lambda row: row["flops"])
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
            counted_speedup=float(operations[0].sum() / operations[1].sum()) if operations else nan,
            computed=summary.average(setting, "computed"),
            reached_top=summary.average(setting, "reached_top"),
        )


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front, slowest first: points to which no other is equal or better in quality and speedup
    and better in one of them."""
    measured = [point for point in points if not (isnan(point.quality) or isnan(point.speedup))]

    def beaten(point: Point) -> bool:
        return any(
            other.quality >= point.quality
            and other.speedup >= point.speedup
            and (other.quality, other.speedup) != (point.quality, point.speedup)
            for other in measured
        )

    return sorted((point for point in measured if not beaten(point)), key=lambda point: point.speedup)


# ---- tables ----------------------------------------------------------------------------------------


def written(value: float, form: str) -> str:
    return "" if isnan(value) else f"{value:{form}}"


def small_interval(value: Interval) -> str:
    text = written(value.value, ".4f")
    return text if isnan(value.low) else f"{text} [{value.low:.4f}, {value.high:.4f}]"


COLUMNS: dict[str, Callable[[Point], str]] = {
    "setting": lambda point: point.setting,
    "score": lambda point: with_interval(point.score),
    "KL": lambda point: small_interval(point.kl),
    "median KL": lambda point: written(point.kl_median, ".4f"),
    "equal argmaxes": lambda point: small_interval(point.agreement),
    "TTFT, s": lambda point: written(point.ttft, ".3g"),
    "TTFT speedup": lambda point: (
        "" if isnan(point.speedup) else f"{figure(point.speedup)} ({figure(point.speedup_median)})"
    ),
    "counted speedup": lambda point: figure(point.counted_speedup),
    "computed": lambda point: written(point.computed, ".1%"),
    "reached the top": lambda point: written(point.reached_top, ".1%"),
    "prompts": lambda point: str(point.prompts),
    "changed nothing": lambda point: str(point.changed_nothing or ""),
    "failed": lambda point: str(point.failed or ""),
}


class Frame:
    """Points in order, indexed by number or by setting; a slice is a frame."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = tuple(points)

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    @overload
    def __getitem__(self, key: int | str) -> Point: ...
    @overload
    def __getitem__(self, key: slice) -> Frame: ...
    def __getitem__(self, key: int | str | slice) -> Point | Frame:
        if isinstance(key, slice):
            return Frame(self._points[key])
        if not isinstance(key, str):
            return self._points[key]
        by_setting = {point.setting: point for point in self}
        if key not in by_setting:
            raise KeyError(f"{key!r} is not among the settings {', '.join(by_setting)}")
        return by_setting[key]

    @property
    def table(self) -> Table:
        """The points as rows; columns without a measurement are left out."""
        columns = {name: [cell(point) for point in self] for name, cell in COLUMNS.items()}
        filled = {name: cells for name, cells in columns.items() if any(cells)}
        return Table(TITLE, list(filled), list(zip(*filled.values(), strict=True)))

    def to_frame(self) -> pandas.DataFrame:
        """One row per setting, unrounded, with a column for each option that varies; needs pandas.

        Settings are as JSON, which `pruning=` takes, and options that are not all numbers are as text.
        """
        rows = [
            {"setting": point.setting, **options, **point.row(), "pruning": point.pruning.to_json()}
            for point, options in zip(self, varied([point.pruning for point in self]), strict=True)
        ]
        frame: pandas.DataFrame = package("pandas", "to_frame", "longbench").DataFrame(rows)
        for name in frame:
            if frame[name].dtype == object:
                frame[name] = frame[name].map(str, na_action="ignore")
        return frame

    def __repr__(self) -> str:
        return self.table.text()

    def _repr_html_(self) -> str:
        return self.table.html()


def varied(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """For each method, the fields of Pruning that differ among them; a single stage is layer and keep."""
    tables: list[dict[str, Any]] = []
    for method in methods:
        table: dict[str, Any] = {}
        if isinstance(method, Pruning) and method.stages:
            table = {field.name: getattr(method, field.name) for field in fields(method)}
            if len(method.stages) == 1:
                ((layer, keep),) = table.pop("stages")
                table = {"layer": layer, "keep": keep, **table}
        tables.append(table)
    values = {name: {table[name] for table in tables if name in table} for table in tables for name in table}
    return [{name: value for name, value in table.items() if len(values[name]) > 1} for table in tables]
