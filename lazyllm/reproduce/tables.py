"""The paper's tables for a run, with the paper's results for the same model beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lazyllm.evaluation.longbench.datasets import CATEGORIES
from lazyllm.evaluation.report import figure, with_deviation, with_interval
from lazyllm.evaluation.summary import DENSE_LABEL, Summary
from lazyllm.reproduce.paper import FIRST_TOKEN, Published
from lazyllm.reproduce.rivals import BASELINE, LAZY
from lazyllm.support.tables import Table

ALL = "All"
POOLED = "scores are means of data sets, shares and speedups are of all items together"


@dataclass(frozen=True)
class Results:
    """A run. `settings` are the labels of those that are shown as one, several if they differ by seed: by
    counted speedup and method, or in Figure 6 by keep and layer. Dense is none of them."""

    summary: Summary
    settings: Mapping[tuple[float, str | int], Sequence[str]]
    published: Published

    @property
    def groups(self) -> list[tuple[str, Sequence[str]]]:
        """Categories with their data sets, and all of them together."""
        return [*self.summary.categories.items(), (ALL, self.summary.datasets)]

    @property
    def methods(self) -> list[tuple[str, str, Sequence[str]]]:
        """Counted speedup, method and labels; dense first."""
        compared = [(f"{speed:g}x", str(method), labels) for (speed, method), labels in self.settings.items()]
        return [("", BASELINE, [DENSE_LABEL]), *compared]

    def score(self, setting: str, category: str) -> float:
        summary = self.summary
        return summary.mean_score(setting) if category == ALL else summary.category_score(setting, category)

    def speedups(self, settings: Sequence[str], names: Sequence[str], timing: str = "ttft") -> list[float]:
        """Of the settings that have one."""
        speeds = (self.summary.speed(setting, timing, names) for setting in settings)
        return [speed.of_sums for speed in speeds if speed]

    def difference(self, settings: Sequence[str], category: str) -> str:
        """The paired difference to dense of a method with a single setting."""
        if len(settings) > 1 or settings[0] == DENSE_LABEL:
            return ""
        difference = self.summary.difference(settings[0], None if category == ALL else category)
        return with_interval(difference, signed=True)

    def heading(self, category: str, names: Sequence[str]) -> str:
        """The category; beside the paper's results, also how many of its data sets were run."""
        n_all = len(CATEGORIES.get(category, ()))
        part = self.published and len(names) < n_all
        return f"{category} ({len(names)} of {n_all} data sets)" if part else category

    def paper(self, category: str, method: str, *columns: str) -> list[str]:
        """The paper's cells; none without its results."""
        cells = self.published.get((category, method), {})
        return [cells.get(column, "") for column in columns] if self.published else []


def accuracy(results: Results) -> Table:
    """Table 1: score and speedup of the first token."""
    rows = [
        [
            results.heading(category, names),
            method,
            spread([results.score(setting, category) for setting in settings]),
            results.difference(settings, category),
            spread(results.speedups(settings, names), "x"),
            *results.paper(category, method, "score", "first token"),
        ]
        for category, names in results.groups
        for _, method, settings in results.methods
    ]
    heads = ["category", "method", "score", "paired difference [95 %]", "TTFT speedup"]
    heads += ["paper: score", "paper: TTFT speedup"] if results.published else []
    return Table(f"Table 1: accuracy and speedup of the first token ({POOLED})", heads, rows)


def work(results: Results) -> Table:
    """Table 2: how much of the prompt is computed by the end, and the speedup of whole answers."""
    summary = results.summary
    ((_, _, lazy),) = (row for row in results.methods if row[1] == LAZY)
    rows = [
        [
            results.heading(category, names),
            f"{summary.average(lazy[0], 'computed', names):.2%}",
            f"{summary.average(lazy[0], 'reached_top', names):.2%}",
            spread(results.speedups(lazy, names, "seconds"), "x"),
            *results.paper(category, LAZY, "computed", "whole answer"),
        ]
        for category, names in results.groups
    ]
    heads = ["category", "prompt computed", "prompt that reached the top", "generation speedup"]
    heads += ["paper: prompt computed", "paper: generation speedup"] if results.published else []
    return Table(f"Table 2: prompt tokens computed, and speedup of whole answers ({POOLED})", heads, rows)


def strengths(results: Results) -> Table:
    """Figure 5 as a table: every method at every speedup by counted work."""
    summary = results.summary
    rows = [
        [
            counted,
            method,
            with_interval(summary.mean(settings[0]))
            if len(settings) == 1
            else spread([summary.mean_score(setting) for setting in settings]),
            results.difference(settings, ALL),
            *(
                spread(results.speedups(settings, summary.datasets, timing), "x")
                for timing in ("ttft", "seconds")
            ),
            f"{np.mean([summary.average(setting, 'computed') for setting in settings]):.0%}",
        ]
        for counted, method, settings in results.methods
    ]
    heads = ["counted speedup", "method", "score [95 %]", "paired difference [95 %]"]
    heads += ["TTFT speedup", "whole answers", "prompt computed by the end"]
    return Table(f"Figure 5: score and speedup of every method ({POOLED})", heads, rows)


def first_token(results: Results) -> Table:
    """Figure 1: how long the first token takes, in decode steps and as a share of the answer, run densely."""
    rows = results.summary.timed(DENSE_LABEL)
    first, whole = (sum(row["timing"][name] for row in rows) for name in ("ttft", "seconds"))
    n_steps = sum(row["new_tokens"] - 1 for row in rows)
    step = (whole - first) / n_steps if n_steps else np.nan
    ours = {
        "prompt tokens, mean": f"{np.mean([row['prompt_tokens'] for row in rows]):.0f}",
        "new tokens, mean": f"{np.mean([row['new_tokens'] for row in rows]):.0f}",
        "first token's time, in decode steps": f"{first / len(rows) / step:.1f}",
        "first token's share of the time": f"{100 * first / whole:.0f} %",
    }
    cells = [[name, here, paper] for (name, here), paper in zip(ours.items(), FIRST_TOKEN, strict=True)]
    return Table("Figure 1: the first token's time, dense", ["", "here", "paper: Llama 2 7B"], cells)


def spread(values: Sequence[float], unit: str = "") -> str:
    """A single value, or mean and standard deviation over seeds."""
    if not values or np.isnan(values).any():
        return ""
    return figure(values[0]) + unit if len(values) == 1 else with_deviation(values) + unit
