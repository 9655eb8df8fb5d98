"""Summary of a run's rows: scores with intervals, differences to dense, speedups, shares computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isnan, nan
from typing import Any, NamedTuple

import numpy as np

from lazyllm.evaluation.intervals import Interval, interval, mean

Row = Mapping[str, Any]
Item = tuple[str, str]
"""Names an item by its data set and its id."""
DENSE_LABEL = "dense"


class Speed(NamedTuple):
    """Speedup against dense over common items: ratio of summed times, and median of the ratios."""

    of_sums: float
    median: float

    def __str__(self) -> str:
        return "" if isnan(self.of_sums) else f"{self.of_sums:.2f} ({self.median:.2f})"


NO_SPEED = Speed(nan, nan)


class Summary:
    """Statistics over rows without an error; `failed` has the others. `category` maps data sets.

    A result may be there once for each environment that it was timed in; it counts once in everything but
    times, and times of different environments are kept apart.
    """

    def __init__(self, rows: Sequence[Row], category: Callable[[str], str]) -> None:
        self.failed = [row for row in rows if "error" in row]
        self.settings = list(dict.fromkeys(row["setting"] for row in rows))
        self.datasets = list(dict.fromkeys(row["dataset"] for row in rows))
        self.categories: dict[str, list[str]] = {}
        for name in self.datasets:
            self.categories.setdefault(category(name), []).append(name)
        self._index: dict[tuple[str | None, str, str], dict[Item, Row]] = {}
        timed: dict[str, None] = {}
        for row in rows:
            if "error" not in row:
                timed[row["environment"]] = None
                for environment in (None, row["environment"]):
                    place = environment, row["setting"], row["dataset"]
                    self._index.setdefault(place, {}).setdefault(item_of(row), row)
        self.rows = [
            row for (place, *_), items in self._index.items() if place is None for row in items.values()
        ]
        self.environments = sorted(timed, key=self.n_timed, reverse=True)
        """Environments, those with the most rows first."""

    def of(
        self, setting: str, datasets: Sequence[str] | None = None, environment: str | None = None
    ) -> dict[Item, Row]:
        """The rows of a setting; with an `environment`, those that were timed there."""
        names = self.datasets if datasets is None else datasets
        found = (self._index.get((environment, setting, name), {}) for name in names)
        return {item: row for items in found for item, row in items.items()}

    @property
    def uneven(self) -> bool:
        """True if a setting lacks an item that another has."""
        return len(self.rows) < len(self.settings) * len(set(map(item_of, self.rows)))

    @property
    def items(self) -> dict[str, int]:
        """Number of items of each data set that has results."""
        items = set(map(item_of, [*self.rows, *self.failed]))
        return {name: sum(dataset == name for dataset, _ in items) for name in self.datasets}

    # ---- scores, 0 to 100, not rounded -----------------------------------------------------------

    def score(self, setting: str, name: str) -> float:
        """Mean score of a data set; nan without a row."""
        return mean(100 * self.values(setting, "score", [name]))

    def mean(self, setting: str, category: str | None = None) -> Interval:
        """Mean with its interval, over the categories, each with the same weight, or over one's data sets."""
        return self._mean(lambda name: 100 * self.values(setting, "score", [name]), category, 0)

    def difference(self, setting: str, category: str | None = None) -> Interval:
        """Difference to dense over common items, as `mean`; nan if a data set has no common item."""

        def differences(name: str) -> np.ndarray:
            dense, ours = self.paired(setting, lambda row: 100 * row["score"], [name])
            sample: np.ndarray = ours - dense
            return sample

        return self._mean(differences, category, -100)

    def _mean(self, sample: Callable[[str], np.ndarray], category: str | None, low: float) -> Interval:
        categories = self.categories if category is None else [category]
        return interval([[sample(name) for name in self.categories[each]] for each in categories], low, 100)

    # ---- times -----------------------------------------------------------------------------------

    def n_timed(self, environment: str, setting: str | None = None) -> int:
        """Number of rows, of all settings or of one, that were timed in an environment."""
        settings = self.settings if setting is None else [setting]
        return sum(len(self.of(label, environment=environment)) for label in settings)

    def environment_of(self, setting: str) -> str | None:
        """The environment with the most rows that timed the setting and dense on an item in common, or else
        the setting."""
        ours = {name: self.of(setting, environment=name) for name in self.environments}
        timed = [name for name in self.environments if ours[name]]
        paired = (name for name in timed if ours[name].keys() & self.of(DENSE_LABEL, environment=name).keys())
        return next(paired, timed[0] if timed else None)

    def timed(self, setting: str) -> list[Row]:
        """The rows of a setting in its environment."""
        name = self.environment_of(setting)
        return [] if name is None else [*self.of(setting, environment=name).values()]

    def speed(
        self,
        setting: str,
        timing: str,
        datasets: Sequence[str] | None = None,
        environment: str | None = None,
    ) -> Speed:
        """Speedup of "ttft" or "seconds" in an environment, by default the setting's; NO_SPEED without an
        item in common with dense there."""
        if name := environment or self.environment_of(setting):
            dense, ours = self.paired(setting, lambda row: row["timing"][timing], datasets, name)
            if len(ours):
                return Speed(float(dense.sum() / ours.sum()), float(np.median(dense / ours)))
        return NO_SPEED

    # ---- any value -------------------------------------------------------------------------------

    def paired(
        self,
        setting: str,
        value: Callable[[Row], float | None],
        datasets: Sequence[str] | None = None,
        environment: str | None = None,
    ) -> np.ndarray:
        """Values (2, n) of dense and of the setting on common items where both are known."""
        dense, ours = (self.of(label, datasets, environment) for label in (DENSE_LABEL, setting))
        pairs = [(value(dense[item]), value(ours[item])) for item in sorted(dense.keys() & ours.keys())]
        return np.array([pair for pair in pairs if None not in pair], float).reshape(-1, 2).T

    def values(self, setting: str, field: str, datasets: Sequence[str] | None = None) -> np.ndarray:
        """The values of a field, of the items that have it."""
        rows = self.of(setting, datasets).values()
        return np.array([row[field] for row in rows if field in row], float)

    def average(self, setting: str, field: str, datasets: Sequence[str] | None = None) -> float:
        return mean(self.values(setting, field, datasets))

    def pooled(self, setting: str, field: str, high: float = inf) -> Interval:
        """Mean of a field, whose values are from 0 to `high`, over all items, with its interval."""
        return interval([[self.values(setting, field)]], 0, high)

    def count(self, setting: str, field: str) -> int:
        """Number of items with a true `field`."""
        return int(self.values(setting, field).sum())


def item_of(row: Row) -> Item:
    return row["dataset"], row["item"]


def failure(row: Row) -> str:
    """Which item failed, under which setting, and why."""
    return f"{row['dataset']} {row['item']}, {row['setting']}: {row['error']}"


def common(rows: Sequence[Row]) -> list[Row]:
    """The rows of the items that have a result under every setting that has any."""
    good = [row for row in rows if "error" not in row]
    items: dict[str, set[Item]] = {}
    for row in good:
        items.setdefault(row["setting"], set()).add(item_of(row))
    shared = set.intersection(*items.values()) if items else set()
    return [row for row in good if item_of(row) in shared]
