"""Summary of a run's rows: scores with intervals, differences to dense, speedups, shares computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan
from typing import Any

import numpy as np

from lazyllm.evaluation.intervals import Interval, interval
from lazyllm.evaluation.results import Key

Row = Mapping[str, Any]
DENSE = "dense"
SEED_OF = re.compile(r", seed=\d+")


@dataclass(frozen=True)
class Speed:
    """Speedup against dense over common items: ratio of summed times, and median of the ratios."""

    of_sums: float
    median: float


class Summary:
    """Statistics over rows without an error; `failed` has the others. `category` maps data sets.

    A result may be there once for each environment that it was timed in; it counts once in everything but
    times, and times of different environments are kept apart.
    """

    def __init__(self, rows: Sequence[Row], category: Callable[[str], str]) -> None:
        good = [row for row in rows if "error" not in row]
        self.rows = list({Key.of(row): row for row in reversed(good)}.values())[::-1]
        self.failed = [row for row in rows if "error" in row]
        self._timed: dict[str, list[Row]] = {}
        for row in good:
            self._timed.setdefault(row["environment"], []).append(row)
        self.environments = sorted(self._timed, key=lambda one: -len(self._timed[one]))
        """Environments, those with the most rows first."""
        self.settings = list(dict.fromkeys(row["setting"] for row in rows))
        self.datasets = list(dict.fromkeys(row["dataset"] for row in rows))
        self.categories: dict[str, list[str]] = {}
        for name in self.datasets:
            self.categories.setdefault(category(name), []).append(name)

    @cached_property
    def seeded(self) -> dict[str, list[str]]:
        """Groups of settings that differ only in the seed, by their label without it."""
        alike: dict[str, list[str]] = {}
        for setting in self.settings:
            alike.setdefault(SEED_OF.sub("", setting), []).append(setting)
        return {common: several for common, several in alike.items() if len(several) > 1}

    @cached_property
    def _scores(self) -> dict[tuple[str, str], dict[str, float]]:
        """By setting and data set: the score of each item."""
        made: dict[tuple[str, str], dict[str, float]] = {}
        for row in self.rows:
            made.setdefault((row["setting"], row["dataset"]), {})[row["item"]] = row["score"]
        return made

    def _values(self, setting: str, name: str) -> np.ndarray:
        return np.array(list(self._scores.get((setting, name), {}).values()))

    def score(self, setting: str, name: str) -> float:
        """Mean score of a data set, 0 to 100, not rounded; nan without a row."""
        values = self._values(setting, name)
        return 100 * float(values.mean()) if len(values) else float("nan")

    def score_within(self, setting: str, name: str, bin_of: Callable[[Row], str]) -> dict[str, float]:
        """Mean score, 0 to 100, of each part of a data set; `bin_of` names the part of a row."""
        parts: dict[str, list[float]] = {}
        for row in self.rows:
            if (row["setting"], row["dataset"]) == (setting, name):
                parts.setdefault(bin_of(row), []).append(row["score"])
        return {part: 100 * float(np.mean(scores)) for part, scores in parts.items()}

    def category_score(self, setting: str, category: str) -> float:
        return float(np.mean([self.score(setting, name) for name in self.categories[category]]))

    def mean_score(self, setting: str) -> float:
        """Mean over the categories, each with the same weight."""
        return float(np.mean([self.category_score(setting, category) for category in self.categories]))

    def mean(self, setting: str, category: str | None = None) -> Interval:
        """Mean over the categories, or over the data sets of one category, with its interval."""
        value = self.mean_score(setting) if category is None else self.category_score(setting, category)
        several = self._chosen(category).values()
        return interval(
            value, [[100 * self._values(setting, name) for name in names] for names in several], 0, 100
        )

    def difference(self, setting: str, category: str | None = None) -> Interval | None:
        """Difference to dense over common items, as `mean`; None if a data set has no common item."""
        pairs: dict[str, np.ndarray] = {}
        categories = self._chosen(category)
        for name in [name for names in categories.values() for name in names]:
            ours, dense = (self._scores.get((one, name), {}) for one in (setting, DENSE))
            common = [item for item in ours if item in dense]
            if not common:
                return None
            pairs[name] = np.array([ours[item] - dense[item] for item in common])
        value = np.mean([np.mean([pairs[name].mean() for name in names]) for names in categories.values()])
        groups = [[100 * pairs[name] for name in names] for names in categories.values()]
        return interval(100 * float(value), groups, -100, 100)

    @cached_property
    def uneven(self) -> bool:
        """True if a setting lacks an item that another has."""
        return len(self.rows) < len(self.settings) * len({(row["dataset"], row["item"]) for row in self.rows})

    @property
    def items(self) -> dict[str, int]:
        """Number of items of each data set that has results."""
        items = {(row["dataset"], row["item"]) for row in [*self.rows, *self.failed]}
        return {name: sum(of == name for of, _ in items) for name in self.datasets}

    def n_items(self, setting: str) -> int:
        return sum(len(self._scores.get((setting, name), {})) for name in self.datasets)

    def n_paired(self, setting: str) -> int:
        """Number of items that have a row for both the setting and dense."""
        return sum(
            len(self._scores.get((setting, name), {}).keys() & self._scores.get((DENSE, name), {}).keys())
            for name in self.datasets
        )

    def _chosen(self, category: str | None) -> Mapping[str, list[str]]:
        return self.categories if category is None else {category: self.categories[category]}

    def n_timed(self, environment: str, setting: str | None = None) -> int:
        """Number of rows, of all settings or of one, that were timed in an environment."""
        return sum(setting in (None, row["setting"]) for row in self._timed[environment])

    def environments_of(self, setting: str) -> list[str]:
        """Environments that timed the setting, first those that timed dense on an item in common."""
        items: dict[str, dict[str, set[tuple[str, str]]]] = {}
        for name in self.environments:
            of = items[name] = {setting: set(), DENSE: set()}
            for row in self._timed[name]:
                if row["setting"] in of:
                    of[row["setting"]].add((row["dataset"], row["item"]))
        known = [name for name in self.environments if items[name][setting]]
        return sorted(known, key=lambda name: not items[name][setting] & items[name][DENSE])

    def timed(self, setting: str) -> list[Row]:
        """The rows of a setting in the first of its environments."""
        several = self.environments_of(setting)
        return [row for row in self._timed[several[0]] if row["setting"] == setting] if several else []

    def paired(
        self,
        setting: str,
        value: Callable[[Row], float | None],
        datasets: Sequence[str] | None = None,
        environment: str | None = None,
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Values of dense and of the setting on common items where both are known; None if there are none.

        With an `environment`, values are of the rows that were timed there.
        """
        found: dict[str, dict[tuple[str, str], float]] = {setting: {}, DENSE: {}}
        for row in self.rows if environment is None else self._timed[environment]:
            wanted = row["setting"] in found and (datasets is None or row["dataset"] in datasets)
            if wanted and (number := value(row)) is not None:
                found[row["setting"]][row["dataset"], row["item"]] = number
        common = sorted(found[setting].keys() & found[DENSE].keys())
        dense, ours = (np.array([found[one][key] for key in common]) for one in (DENSE, setting))
        return (dense, ours) if common else None

    def speed(
        self,
        setting: str,
        timing: str,
        datasets: Sequence[str] | None = None,
        environment: str | None = None,
    ) -> Speed | None:
        """Speedup of "ttft" or "seconds" in an environment, by default the first of the setting's; None
        without an item in common with dense there."""
        several = [environment] if environment is not None else self.environments_of(setting)
        if not several:
            return None
        times = self.paired(setting, lambda row: row["timing"][timing], datasets, several[0])
        if times is None:
            return None
        dense, ours = times
        return Speed(float(dense.sum() / ours.sum()), float(np.median(dense / ours)))

    def average(self, setting: str, field: str, datasets: Sequence[str] | None = None) -> float:
        values = [
            row[field]
            for row in self.rows
            if row["setting"] == setting and (datasets is None or row["dataset"] in datasets)
        ]
        return float(np.mean(values)) if values else float("nan")

    def pooled(self, setting: str, field: str, high: float = inf) -> Interval:
        """Mean of a field, whose values are from 0 to `high`, over all items, with its interval."""
        values = np.array([row[field] for row in self.rows if row["setting"] == setting], float)
        return interval(float(values.mean()) if len(values) else nan, [[values]], 0, high)

    def count(self, setting: str, field: str) -> int:
        """Number of items with a true `field`."""
        return sum(bool(row[field]) for row in self.rows if row["setting"] == setting)


def common(rows: Sequence[Row]) -> list[Row]:
    """The rows of the items that have a result under every setting that has any."""
    items: dict[str, set[tuple[str, str]]] = {}
    for row in rows:
        if "error" not in row:
            items.setdefault(row["setting"], set()).add((row["dataset"], row["item"]))
    shared = set.intersection(*items.values()) if items else set()
    return [row for row in rows if "error" not in row and (row["dataset"], row["item"]) in shared]
