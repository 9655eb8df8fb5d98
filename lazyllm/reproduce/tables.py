"""The paper's tables for a run, with the paper's results for the same model beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lazyllm.evaluation.longbench.datasets import CATEGORIES
from lazyllm.evaluation.report import figure, with_deviation, with_interval
from lazyllm.evaluation.summary import DENSE, Summary
from lazyllm.reproduce.published import FIRST_TOKEN, FirstToken, Published
from lazyllm.reproduce.rivals import BASELINE, LAZY
from lazyllm.support.tables import Table

ALL = "All"
POOLED = "scores are means of data sets, shares and speedups are of all items together"
Labels = Mapping[str, Sequence[str]]
"""By method: labels of its settings."""


def accuracy(summary: Summary, labels: Labels, published: Published | None) -> Table:
    """Table 1: score and speedup of the first token."""
    rows = []
    for category, names in [*summary.categories.items(), (ALL, summary.datasets)]:
        for method, settings in labels.items():
            scores = [score_of(summary, one, category) for one in settings]
            speeds = [speed for one in settings if (speed := speedup(summary, one, "ttft", names))]
            row = [category_cell(category, names, published), method, spread(scores)]
            row += [difference_cell(summary, settings, category), spread(speeds, "x")]
            if published:
                theirs = published.accuracy.get((category, method))
                row += [figure(theirs.score), f"{theirs.speedup:.2f}x"] if theirs else ["", ""]
            rows.append(row)
    heads = ["category", "method", "score", "paired difference [95 %]", "TTFT speedup"]
    heads += ["paper: score", "paper: TTFT speedup"] if published else []
    return Table(f"Table 1: accuracy and speedup of the first token ({POOLED})", heads, rows)


def work(summary: Summary, labels: Labels, published: Published | None) -> Table:
    """Table 2: how much of the prompt is computed by the end, and the speedup of whole answers."""
    rows = []
    setting = labels[LAZY][0]
    for category, names in [*summary.categories.items(), (ALL, summary.datasets)]:
        speed = speedup(summary, setting, "seconds", names)
        row = [
            category_cell(category, names, published),
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
    return Table(f"Table 2: prompt tokens computed, and speedup of whole answers ({POOLED})", heads, rows)


def strengths(summary: Summary, labels: Mapping[float, Labels]) -> Table:
    """Figure 5 as a table: every method at every speedup by counted work."""
    rows = [method_row(summary, "", BASELINE, [DENSE])]
    for speed, several in labels.items():
        rows += [method_row(summary, f"{speed:g}x", method, settings) for method, settings in several.items()]
    heads = ["counted speedup", "method", "score [95 %]", "paired difference [95 %]"]
    heads += ["TTFT speedup", "whole answers", "prompt computed by the end"]
    return Table(f"Figure 5: score and speedup of every method ({POOLED})", heads, rows)


def method_row(summary: Summary, counted: str, method: str, settings: Sequence[str]) -> list[str]:
    if len(settings) == 1:
        score = with_interval(summary.mean(settings[0]))
    else:
        score = spread([summary.mean_score(one) for one in settings])
    speeds = [
        [speed for one in settings if (speed := speedup(summary, one, timing, summary.datasets))]
        for timing in ("ttft", "seconds")
    ]
    computed = np.mean([summary.average(one, "computed") for one in settings])
    return [
        counted,
        method,
        score,
        difference_cell(summary, settings, ALL),
        *(spread(one, "x") for one in speeds),
        f"{computed:.0%}",
    ]


def first_token(summary: Summary) -> Table:
    """Figure 1: how long the first token takes, in decode steps and as a share of the answer, run densely."""
    rows = summary.timed(DENSE)
    first, whole = (sum(row["timing"][name] for row in rows) for name in ("ttft", "seconds"))
    n_steps = sum(row["new_tokens"] - 1 for row in rows)
    step = (whole - first) / n_steps if n_steps else np.nan
    ours = FirstToken(
        float(np.mean([row["prompt_tokens"] for row in rows])),
        float(np.mean([row["new_tokens"] for row in rows])),
        first / len(rows) / step,
        100 * first / whole,
    )
    named = [
        ("prompt tokens, mean", "{:.0f}"),
        ("new tokens, mean", "{:.0f}"),
        ("first token's time, in decode steps", "{:.1f}"),
        ("first token's share of the time", "{:.0f} %"),
    ]
    cells = [
        [name, form.format(one), form.format(theirs)]
        for (name, form), one, theirs in zip(named, ours, FIRST_TOKEN, strict=True)
    ]
    return Table("Figure 1: the first token's time, dense", ["", "here", "paper: Llama 2 7B"], cells)


def category_cell(category: str, names: Sequence[str], published: Published | None) -> str:
    """The category; beside the paper's results, also how many of its data sets were run."""
    n_all = len(CATEGORIES.get(category, ()))
    part = published is not None and len(names) < n_all
    return f"{category} ({len(names)} of {n_all} data sets)" if part else category


def difference_cell(summary: Summary, settings: Sequence[str], category: str) -> str:
    """The paired difference to dense of a method with a single setting."""
    if len(settings) > 1 or settings[0] == DENSE:
        return ""
    return with_interval(summary.difference(settings[0], None if category == ALL else category), signed=True)


def score_of(summary: Summary, setting: str, category: str) -> float:
    return summary.mean_score(setting) if category == ALL else summary.category_score(setting, category)


def speedup(summary: Summary, setting: str, timing: str, names: Sequence[str]) -> float | None:
    speed = summary.speed(setting, timing, names)
    return None if speed is None else speed.of_sums


def spread(values: Sequence[float], unit: str = "") -> str:
    """A single value, or mean and standard deviation over seeds."""
    if not values or np.isnan(values).any():
        return ""
    return figure(values[0]) + unit if len(values) == 1 else with_deviation(values) + unit
