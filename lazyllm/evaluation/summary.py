"""Summary of a run's rows: scores with intervals, differences to dense, speedups, shares computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import inf, isnan, nan, sqrt, tan
from typing import Any, NamedTuple

import numpy as np

Row = Mapping[str, Any]
Item = tuple[str, str]
"""Names an item by its data set and its id."""
DENSE_LABEL = "dense"
LEVEL = 0.95
ANGLES = 4001  # of the numerical integral


class Speed(NamedTuple):
    """Speedup against dense over common items: ratio of summed times, and median of the ratios."""

    of_sums: float
    median: float

    def __str__(self) -> str:
        return "" if isnan(self.of_sums) else f"{self.of_sums:.2f} ({self.median:.2f})"


NO_SPEED = Speed(nan, nan)


class Summary:
    """Statistics over rows without an error; `failed` has the others. `category` maps data sets.

    A trial may have a row for each environment in which it was timed; it counts once in everything but times,
    and times of different environments are kept apart.
    """

    def __init__(self, rows: Sequence[Row], category: Callable[[str], str]) -> None:
        self.failed = [row for row in rows if "error" in row]
        self.settings = list(dict.fromkeys(row["setting"] for row in rows))
        self.datasets = list(dict.fromkeys(row["dataset"] for row in rows))
        self.categories: dict[str, list[str]] = {}
        for name in self.datasets:
            self.categories.setdefault(category(name), []).append(name)
        good = [row for row in rows if "error" not in row]
        self._index: dict[tuple[str | None, str, str], dict[Item, Row]] = {}
        for row in good:
            for environment in (None, row["environment"]):
                place = environment, row["setting"], row["dataset"]
                self._index.setdefault(place, {}).setdefault(item_of(row), row)
        self.rows = [row for place, items in self._index.items() if place[0] is None for row in items.values()]
        self.environments = sorted(dict.fromkeys(row["environment"] for row in good), key=self.n_timed, reverse=True)
        """Environments, those with the most rows first."""

    def of(
        self, setting: str, datasets: Sequence[str] | None = None, environment: str | None = None
    ) -> dict[Item, Row]:
        """The rows of a setting; with an `environment`, those that were timed there."""
        names = self.datasets if datasets is None else datasets
        found = (self._index.get((environment, setting, name), {}) for name in names)
        return {item: row for items in found for item, row in items.items()}

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
        """Mean with its interval, over the categories with equal weights, or over one category's data sets."""
        return self._mean(lambda name: 100 * self.values(setting, "score", [name]), category, 0)

    def difference(self, setting: str, category: str | None = None) -> Interval:
        """Difference to dense over common items, as `mean`; nan if a data set has no common item."""
        scores = partial(self.paired, setting, lambda row: 100 * row["score"])
        return self._mean(lambda name: np.diff(scores([name]), axis=0)[0], category, -100)

    def _mean(self, sample: Callable[[str], np.ndarray], category: str | None, low: float) -> Interval:
        categories = self.categories if category is None else [category]
        return interval([[sample(name) for name in self.categories[group]] for group in categories], low, 100)

    # ---- times -----------------------------------------------------------------------------------

    def n_timed(self, environment: str) -> int:
        """Number of rows that were timed in an environment."""
        return sum(len(self.of(label, environment=environment)) for label in self.settings)

    def environment_of(self, setting: str) -> str | None:
        """The environment with the most rows: of those that timed the setting and dense on a common item, or
        else of those that timed the setting."""
        rows = {name: self.of(setting, environment=name) for name in self.environments}
        timed = [name for name in self.environments if rows[name]]
        paired = (name for name in timed if rows[name].keys() & self.of(DENSE_LABEL, environment=name).keys())
        return next(paired, timed[0] if timed else None)

    def timed(self, setting: str) -> list[Row]:
        """The rows of a setting in its environment."""
        name = self.environment_of(setting)
        return [] if name is None else [*self.of(setting, environment=name).values()]

    def speed(self, setting: str, timing: str, datasets: Sequence[str] | None = None) -> Speed:
        """Speedup of "ttft" or "seconds" in the setting's environment; NO_SPEED without an item in common
        with dense there."""
        if name := self.environment_of(setting):
            dense, pruned = self.paired(setting, lambda row: row["timing"][timing], datasets, name)
            if len(pruned):
                return Speed(float(dense.sum() / pruned.sum()), float(np.median(dense / pruned)))
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
        dense, rows = (self.of(label, datasets, environment) for label in (DENSE_LABEL, setting))
        pairs = [(value(dense[item]), value(rows[item])) for item in sorted(dense.keys() & rows.keys())]
        return np.array([pair for pair in pairs if None not in pair], float).reshape(-1, 2).T

    def values(self, setting: str, field: str, datasets: Sequence[str] | None = None) -> np.ndarray:
        """The values of a field, of the items that have it."""
        return np.array([row[field] for row in self.of(setting, datasets).values() if field in row], float)


def item_of(row: Row) -> Item:
    return row["dataset"], row["item"]


def failure(row: Row) -> str:
    """Which item failed, under which setting, and why."""
    return f"{row['dataset']} {row['item']}, {row['setting']}: {row['error']}"


# ---- how much of the prompt each layer has computed, by new token -------------------------------


def token_use(rows: Sequence[Row]) -> dict[int, np.ndarray]:
    """By layer: the mean share of the prompt computed at each step. An ended answer keeps its last share."""
    layers = sorted({int(layer) for row in rows for layer in row["used"]})
    steps = max((row["new_tokens"] for row in rows), default=0)

    def shares(row: Row, layer: int) -> np.ndarray:
        nearest = max(recorded for recorded in map(int, row["used"]) if recorded <= layer)
        series = np.asarray(row["used"][str(nearest)], float)
        return np.asarray(np.pad(series, (0, steps - len(series)), mode="edge") / row["prompt_tokens"])

    return {layer: np.mean([shares(row, layer) for row in rows], axis=0) for layer in layers}


def token_use_by_setting(rows: Sequence[Row]) -> dict[str, dict[int, np.ndarray]]:
    """`token_use` of each setting that pruned a token of any prompt, where rows recorded it."""
    pruned = dict.fromkeys(row["setting"] for row in rows if row["used"] and len(row["used"]) > 1)
    return {setting: token_use([row for row in rows if row["setting"] == setting]) for setting in pruned}


# ---- 95 % intervals of means over items, data sets and categories, by Student's t ----------------


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def mean(values: Sequence[float] | np.ndarray) -> float:
    """The mean; nan without values."""
    return float(np.mean(values)) if len(values) else nan


def interval(groups: Sequence[Sequence[np.ndarray]], low: float = -inf, high: float = inf) -> Interval:
    """The mean over groups of the mean over their samples of each sample's mean, with its interval. For groups
    [[a, b], [c]] that is ((mean a + mean b) / 2 + mean c) / 2. Items are drawn within each sample, as data sets
    are fixed. `low` and `high` are the least and the greatest possible value. The bounds are nan if a sample
    has fewer than two values.
    """
    value = mean([mean([mean(sample) for sample in group]) for group in groups])
    samples = [(sample, len(groups) * len(group)) for group in groups for sample in group]
    if any(len(sample) < 2 for sample, _ in samples):
        return Interval(value, nan, nan)
    # the share of each sample in the variance of the mean, and its degrees of freedom
    parts = np.array([sample.var(ddof=1) / len(sample) / divisor**2 for sample, divisor in samples])
    freedom = np.array([len(sample) - 1 for sample, _ in samples])
    if (variance := parts.sum()) == 0:
        return Interval(value, value, value)
    # With two or three items in a sample, Satterthwaite's degrees of freedom are too few and Welch's (1947)
    # too many: in simulations their intervals cover up to 98 % and as little as 92 %. Their mean is within 2
    # points of 95 %, for equal variances and for those as different as 1 : 4 : 16.
    shares = parts / variance
    satterthwaite = 1 / (shares**2 / freedom).sum()
    welch = 1 / (shares**2 / (freedom + 2)).sum() - 2
    half = student_t(float(satterthwaite + welch) / 2) * sqrt(variance)
    # a value that is rounded beyond `low` or `high` stays within its interval
    return Interval(value, min(value, max(low, value - half)), max(value, min(high, value + half)))


@cache
def student_t(freedom: float) -> float:
    """The t with P(|T| < t) = LEVEL, for one degree of freedom or more, whole or not.

    The density of T is integrated over the angle a with T = sqrt(freedom) tan(a): cos(a) ** (freedom - 1).
    """
    angles = np.linspace(0, np.pi / 2, ANGLES)
    density = np.cos(angles) ** (freedom - 1)
    area = np.append(0, np.cumsum(density[1:] + density[:-1]))
    return sqrt(freedom) * tan(np.interp(LEVEL * area[-1], area, angles))
