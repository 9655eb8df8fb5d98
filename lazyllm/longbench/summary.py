"""What a run's lines come to: scores with intervals, differences to dense, speed, share computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Row = Mapping[str, Any]
DENSE = "dense"
RESAMPLES, SEED = 2000, 0
SEED_OF = re.compile(r", seed=\d+")
LEVEL = (2.5, 97.5)  # percentiles: a 95 % interval


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over settings that differ only in their seed."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(float(np.mean(values)), float(np.std(values, ddof=1)))


@dataclass(frozen=True)
class Speed:
    """Against dense, over the items that both have: ratio of sums, and median of ratios."""

    of_sums: float
    median: float


class Summary:
    """`category` names that of a data set. Only items without an error count; `failed` has the others."""

    def __init__(self, rows: Sequence[Row], category: Callable[[str], str]) -> None:
        self.rows = [row for row in rows if "error" not in row]
        self.failed = [row for row in rows if "error" in row]
        self.settings = list(dict.fromkeys(row["setting"] for row in rows))
        self.datasets = list(dict.fromkeys(row["dataset"] for row in rows))
        self.categories: dict[str, list[str]] = {}
        for name in self.datasets:
            self.categories.setdefault(category(name), []).append(name)

    @cached_property
    def seeded(self) -> dict[str, list[str]]:
        """Settings that differ only in their seed, by what they have in common."""
        alike: dict[str, list[str]] = {}
        for setting in self.settings:
            alike.setdefault(SEED_OF.sub("", setting), []).append(setting)
        return {common: several for common, several in alike.items() if len(several) > 1}

    @cached_property
    def _scores(self) -> dict[tuple[str, str], dict[str, float]]:
        """By setting and data set: item, score."""
        made: dict[tuple[str, str], dict[str, float]] = {}
        for row in self.rows:
            made.setdefault((row["setting"], row["dataset"]), {})[row["item"]] = row["score"]
        return made

    def _values(self, setting: str, name: str) -> np.ndarray:
        return np.array(list(self._scores.get((setting, name), {}).values()))

    def score(self, setting: str, name: str) -> float:
        """Of a data set, 0 to 100; nan without a result."""
        values = self._values(setting, name)
        return round(100 * float(values.mean()), 2) if len(values) else float("nan")

    def score_within(self, setting: str, name: str, bin_of: Callable[[Row], str]) -> dict[str, float]:
        """Of each part of a data set, 0 to 100."""
        parts: dict[str, list[float]] = {}
        for row in self.rows:
            if (row["setting"], row["dataset"]) == (setting, name):
                parts.setdefault(bin_of(row), []).append(row["score"])
        return {part: round(100 * float(np.mean(scores)), 2) for part, scores in parts.items()}

    def category_score(self, setting: str, category: str) -> float:
        return float(np.mean([self.score(setting, name) for name in self.categories[category]]))

    def mean_score(self, setting: str) -> float:
        """The plain mean of the categories."""
        return float(np.mean([self.category_score(setting, category) for category in self.categories]))

    def mean(self, setting: str, category: str | None = None) -> Interval:
        """The plain mean of the categories, or of the data sets of one, with its interval over items."""

        def draw(name: str, random: np.random.Generator) -> np.ndarray:
            return self._draw(self._values(setting, name), random)

        drawn = self._resampled(draw, category)
        value = self.mean_score(setting) if category is None else self.category_score(setting, category)
        return interval(value, drawn)

    def difference(self, setting: str, category: str | None = None) -> Interval | None:
        """To dense, over the items that both have; None where a data set has none. Of all or one category."""
        pairs: dict[str, np.ndarray] = {}
        categories = self._chosen(category)
        for name in [name for names in categories.values() for name in names]:
            ours, dense = (self._scores.get((one, name), {}) for one in (setting, DENSE))
            common = [item for item in ours if item in dense]
            if not common:
                return None
            pairs[name] = np.array([ours[item] - dense[item] for item in common])
        drawn = self._resampled(lambda name, random: self._draw(pairs[name], random), category)
        value = np.mean([np.mean([pairs[name].mean() for name in names]) for names in categories.values()])
        return interval(100 * float(value), drawn)

    def n_paired(self, setting: str) -> int:
        """Items that both the setting and dense have."""
        return sum(
            len(self._scores.get((setting, name), {}).keys() & self._scores.get((DENSE, name), {}).keys())
            for name in self.datasets
        )

    def _chosen(self, category: str | None) -> Mapping[str, list[str]]:
        return self.categories if category is None else {category: self.categories[category]}

    @staticmethod
    def _draw(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """(RESAMPLES,) means of as many values, drawn with replacement; nothing is known from one."""
        if len(values) < 2:
            return np.full(RESAMPLES, np.nan)
        drawn: np.ndarray = values[random.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
        return drawn

    def _resampled(
        self, draw: Callable[[str, np.random.Generator], np.ndarray], category: str | None = None
    ) -> np.ndarray:
        random = np.random.default_rng(SEED)
        means = [
            np.mean([draw(name, random) for name in names], axis=0)
            for names in self._chosen(category).values()
        ]
        drawn: np.ndarray = 100 * np.mean(means, axis=0)
        return drawn

    def speed(self, setting: str, timing: str, datasets: Sequence[str] | None = None) -> Speed | None:
        """`timing` is "ttft" or "seconds"; None where dense has no common item."""
        by_setting: dict[str, dict[tuple[str, str], float]] = {setting: {}, DENSE: {}}
        for row in self.rows:
            if row["setting"] in by_setting and (datasets is None or row["dataset"] in datasets):
                by_setting[row["setting"]][row["dataset"], row["item"]] = row["timing"][timing]
        common = by_setting[setting].keys() & by_setting[DENSE].keys()
        if not common:
            return None
        ours = np.array([by_setting[setting][key] for key in sorted(common)])
        dense = np.array([by_setting[DENSE][key] for key in sorted(common)])
        return Speed(float(dense.sum() / ours.sum()), float(np.median(dense / ours)))

    def average(self, setting: str, field: str, datasets: Sequence[str] | None = None) -> float:
        values = [
            row[field]
            for row in self.rows
            if row["setting"] == setting and (datasets is None or row["dataset"] in datasets)
        ]
        return float(np.mean(values)) if values else float("nan")

    def pooled(self, setting: str, field: str) -> Interval:
        """The plain mean of a field over all items, with its interval over resampled ones."""
        values = np.array([row[field] for row in self.rows if row["setting"] == setting], float)
        drawn = self._draw(values, np.random.default_rng(SEED))
        return interval(float(values.mean()) if len(values) else float("nan"), drawn)

    def count(self, setting: str, field: str) -> int:
        """Of how many items this is true."""
        return sum(bool(row[field]) for row in self.rows if row["setting"] == setting)


def interval(value: float, drawn: np.ndarray) -> Interval:
    """The value lies within, even where all draws are alike but for rounding; nan stays nan."""
    low, high = np.percentile(drawn, LEVEL)
    return Interval(value, float(np.minimum(low, value)), float(np.maximum(high, value)))
