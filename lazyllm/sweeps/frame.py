"""Frame: an ordered collection of points that prints as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from math import isnan
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from lazyllm.evaluation.intervals import Interval
from lazyllm.evaluation.report import figure, with_interval
from lazyllm.method import Method
from lazyllm.pruning import Pruning
from lazyllm.support.optional import package
from lazyllm.support.tables import Table
from lazyllm.sweeps.point import Point

if TYPE_CHECKING:
    import pandas

TITLE = "Settings: quality [95 %], speed against dense"


def small(value: float) -> str:
    return "" if isnan(value) else f"{value:.4f}"


def small_interval(value: Interval) -> str:
    text = small(value.value)
    return text if isnan(value.low) else f"{text} [{small(value.low)}, {small(value.high)}]"


def percent(value: float) -> str:
    return "" if isnan(value) else f"{value:.1%}"


def varied(points: Sequence[Point]) -> list[dict[str, Any]]:
    """For each point, the fields of Pruning that differ among points; a single stage is layer and keep."""
    tables = [fields_of(one.pruning) for one in points]
    values = {name: {table[name] for table in tables if name in table} for table in tables for name in table}
    return [{name: value for name, value in table.items() if len(values[name]) > 1} for table in tables]


def fields_of(method: Method) -> dict[str, Any]:
    if not isinstance(method, Pruning) or not method.stages:
        return {}
    table = {field.name: getattr(method, field.name) for field in fields(method)}
    if len(method.stages) > 1:
        return table
    (stage,) = table.pop("stages")
    return {"layer": stage[0], "keep": stage[1], **table}


COLUMNS: dict[str, Callable[[Point], str]] = {
    "setting": lambda one: one.setting,
    "score": lambda one: with_interval(one.score) if one.scored else "",
    "KL": lambda one: small_interval(one.kl),
    "median KL": lambda one: small(one.kl_median),
    "equal argmaxes": lambda one: small_interval(one.agreement),
    "TTFT, s": lambda one: "" if isnan(one.ttft) else f"{one.ttft:.3g}",
    "TTFT speedup": lambda one: (
        "" if isnan(one.speedup) else f"{figure(one.speedup)} ({figure(one.speedup_median)})"
    ),
    "counted speedup": lambda one: figure(one.counted_speedup),
    "computed": lambda one: percent(one.computed),
    "reached the top": lambda one: percent(one.reached_top),
    "prompts": lambda one: str(one.prompts),
    "changed nothing": lambda one: str(one.changed_nothing or ""),
    "failed": lambda one: str(one.failed or ""),
}


class Frame(Sequence[Point]):
    """Points in order, indexed by number or by setting; a slice is a frame."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = tuple(points)

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Point: ...

    @overload
    def __getitem__(self, key: slice) -> Frame: ...

    def __getitem__(self, key: SupportsIndex | str | slice) -> Point | Frame:
        if isinstance(key, slice):
            return Frame(self._points[key])
        if not isinstance(key, str):
            return self._points[key]
        for one in self._points:
            if one.setting == key:
                return one
        raise KeyError(f"{key!r} is not among the settings {', '.join(one.setting for one in self._points)}")

    @property
    def table(self) -> Table:
        """The points as rows; columns without a measurement are left out."""
        columns = {name: [cell(one) for one in self] for name, cell in COLUMNS.items()}
        told = {name: cells for name, cells in columns.items() if any(cells)}
        return Table(TITLE, list(told), list(zip(*told.values(), strict=True)))

    def to_frame(self) -> pandas.DataFrame:
        """One row per setting, unrounded, with a column for each option that varies; needs pandas.

        Settings are as JSON, which `pruning=` takes, and options that are not all numbers are as text.
        """
        rows = [
            {"setting": one.setting, **axes, **one.row(), "pruning": one.pruning.to_json()}
            for one, axes in zip(self, varied(self), strict=True)
        ]
        made: pandas.DataFrame = package("pandas", "to_frame", "longbench").DataFrame(rows)
        for name in made:
            if made[name].dtype == object:
                made[name] = made[name].map(str, na_action="ignore")
        return made

    def __repr__(self) -> str:
        return self.table.text()

    def _repr_html_(self) -> str:
        return self.table.html()
