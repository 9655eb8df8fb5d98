"""The paper's tables, of a run: by category and method, beside the paper's own figures if there are any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lazyllm.longbench.datasets import DATA_SETS, ENGLISH
from lazyllm.longbench.report import Table, figure, with_deviation, with_interval
from lazyllm.longbench.summary import DENSE, Spread, Summary
from lazyllm.reproduce.published import Published
from lazyllm.reproduce.rivals import LAZY

ALL = "All"
Labels = Mapping[str, Sequence[str]]
"""By method: the labels of its settings."""


def accuracy(summary: Summary, labels: Labels, published: Published | None) -> Table:
    """Table 1: score and speedup of the first token."""
    rows = []
    for category, names in [*summary.categories.items(), (ALL, summary.datasets)]:
        for method, settings in labels.items():
            scores = [score_of(summary, one, category) for one in settings]
            speeds = [speed for one in settings if (speed := speedup(summary, one, "ttft", names))]
            row = [told(category, names, published), method, spread(scores)]
            row += [against_dense(summary, settings, category), spread(speeds, "x")]
            if published:
                theirs = published.accuracy.get((category, method))
                row += [figure(theirs.score), f"{theirs.speedup:.2f}x"] if theirs else ["", ""]
            rows.append(row)
    heads = ["category", "method", "score", "paired difference [95 %]", "TTFT speedup"]
    heads += ["paper: score", "paper: TTFT speedup"] if published else []
    return Table("Table 1: accuracy and speedup of the first token", heads, rows)


def work(summary: Summary, labels: Labels, published: Published | None) -> Table:
    """Table 2: how much of the prompt is computed by the end, and the speedup of whole answers."""
    rows = []
    setting = labels[LAZY][0]
    for category, names in [*summary.categories.items(), (ALL, summary.datasets)]:
        speed = speedup(summary, setting, "seconds", names)
        row = [
            told(category, names, published),
            f"{summary.average(setting, 'computed', names):.2%}",
            f"{summary.average(setting, 'reached_top', names):.2%}",
            "" if speed is None else f"{speed:.2f}x",
        ]
        if published:
            theirs = published.work.get(category)
            row += [f"{theirs.computed:.2f}%", f"{theirs.speedup:.2f}x"] if theirs else ["", ""]
        rows.append(row)
    heads = ["category", "prompt computed", "prompt that reached the top", "generation speedup"]
    heads += ["paper: prompt computed", "paper: generation speedup"] if published else []
    return Table("Table 2: prompt tokens computed, and speedup of whole answers", heads, rows)


def told(category: str, names: Sequence[str], published: Published | None) -> str:
    """With how much of it there is, where the paper's figure beside is of all of it."""
    whole = sum(DATA_SETS[name].category == category for name in ENGLISH)
    part = published is not None and len(names) < whole
    return f"{category} ({len(names)} of {whole} data sets)" if part else category


def against_dense(summary: Summary, settings: Sequence[str], category: str) -> str:
    """Of a method with one setting."""
    if len(settings) > 1 or settings[0] == DENSE:
        return ""
    return with_interval(summary.difference(settings[0], None if category == ALL else category), signed=True)


def score_of(summary: Summary, setting: str, category: str) -> float:
    return summary.mean_score(setting) if category == ALL else summary.category_score(setting, category)


def speedup(summary: Summary, setting: str, timing: str, names: Sequence[str]) -> float | None:
    speed = summary.speed(setting, timing, names)
    return None if speed is None else speed.of_sums


def spread(values: Sequence[float], unit: str = "") -> str:
    """One value, or mean and deviation over seeds."""
    if not values or np.isnan(values).any():
        return ""
    return figure(values[0]) + unit if len(values) == 1 else with_deviation(Spread.of(values)) + unit
