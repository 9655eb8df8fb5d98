"""The paper's tables for a run, with the paper's results for the same model beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lazyllm.evaluation.longbench.datasets import CATEGORIES
from lazyllm.evaluation.report import cell
from lazyllm.evaluation.summary import DENSE_LABEL, NO_SPEED, Summary
from lazyllm.reproduce.paper import BASELINE, FIRST_TOKEN, LAZY, Published
from lazyllm.support.tables import Table

ALL = "All"
POOLED = "scores are means of data sets, shares and speedups are of all items together"


@dataclass(frozen=True)
class Line:
    """A method on a category, or on all if that is None: a line of a table, a point of a figure. `counted` is
    its speedup by counted work; `labels` are its settings, which differ by seed."""

    summary: Summary
    published: Published
    category: str | None
    datasets: Sequence[str]
    counted: str
    method: str
    labels: Sequence[str]

    def heading(self) -> str:
        """The category; beside the paper's results, also how many of its data sets were run."""
        name = self.category or ALL
        n_run, n_all = len(self.datasets), len(CATEGORIES.get(name, ()))
        is_part = self.published and n_run < n_all
        return f"{name} ({n_run} of {n_all} data sets)" if is_part else name

    def scores(self) -> list[float]:
        return [self.summary.mean(label, self.category).value for label in self.labels]

    def mean(self) -> str:
        """The score with its interval or, over seeds, its deviation."""
        if self.labels[1:]:
            return spread(self.scores())
        return cell(self.summary.mean(self.labels[0], self.category))

    def difference(self) -> str:
        """The paired difference to dense of a method with a single setting."""
        if self.labels[1:] or self.method == BASELINE:
            return ""
        return cell(self.summary.difference(self.labels[0], self.category), "+.2f")

    def speedups(self, timing: str) -> list[float]:
        """The speedups of the settings that have one."""
        speeds = (self.summary.speed(label, timing, self.datasets) for label in self.labels)
        return [speed.of_sums for speed in speeds if speed != NO_SPEED]

    def average(self, field: str) -> str:
        shares = [self.summary.average(label, field, self.datasets) for label in self.labels]
        return f"{np.mean(shares):.2%}"

    def paper(self, column: str) -> str:
        return self.published.get((self.category or ALL, self.method), {}).get(column, "")


COLUMNS: dict[str, Callable[[Line], str]] = {
    "category": Line.heading,
    "counted speedup": lambda line: line.counted,
    "method": lambda line: line.method,
    "score": lambda line: spread(line.scores()),
    "score [95 %]": Line.mean,
    "paired difference [95 %]": Line.difference,
    "TTFT speedup": lambda line: spread(line.speedups("ttft"), "x"),
    "generation speedup": lambda line: spread(line.speedups("seconds"), "x"),
    "prompt computed": lambda line: line.average("computed"),
    "prompt that reached the top": lambda line: line.average("reached_top"),
    "paper: score": lambda line: line.paper("score"),
    "paper: TTFT speedup": lambda line: line.paper("first token"),
    "paper: prompt computed": lambda line: line.paper("computed"),
    "paper: generation speedup": lambda line: line.paper("whole answer"),
}


@dataclass(frozen=True)
class Comparison:
    """A run. `settings` are the labels of those that are shown as one, by counted speedup and method, or in
    Figure 6 by keep and layer. Dense is none of them."""

    summary: Summary
    settings: Mapping[tuple[str, str], Sequence[str]]
    published: Published

    @property
    def lines(self) -> list[Line]:
        """For each category, and for all of them together: dense, then the other methods."""
        groups = [*self.summary.categories.items(), (None, self.summary.datasets)]
        methods = [(("", BASELINE), [DENSE_LABEL]), *self.settings.items()]
        return [
            Line(self.summary, self.published, category, names, counted, method, labels)
            for category, names in groups
            for (counted, method), labels in methods
        ]

    def table(self, title: str, heads: Sequence[str], lines: Sequence[Line]) -> Table:
        """The columns with these heads, without the paper's if it has no results for the model."""
        heads = [head for head in heads if self.published or not head.startswith("paper: ")]
        rows = [[COLUMNS[head](line) for head in heads] for line in lines]
        return Table(f"{title} ({POOLED})", heads, rows)


def accuracy(comparison: Comparison) -> Table:
    heads = ["category", "method", "score", "paired difference [95 %]", "TTFT speedup"]
    heads += ["paper: score", "paper: TTFT speedup"]
    return comparison.table("Table 1: accuracy and speedup of the first token", heads, comparison.lines)


def work(comparison: Comparison) -> Table:
    heads = ["category", "prompt computed", "prompt that reached the top", "generation speedup"]
    heads += ["paper: prompt computed", "paper: generation speedup"]
    lines = [line for line in comparison.lines if line.method == LAZY]
    return comparison.table("Table 2: prompt tokens computed, and speedup of whole answers", heads, lines)


def strengths(comparison: Comparison) -> Table:
    """Figure 5 as a table: every method at every speedup by counted work."""
    heads = ["counted speedup", "method", "score [95 %]", "paired difference [95 %]", "TTFT speedup"]
    heads += ["generation speedup", "prompt computed"]
    lines = [line for line in comparison.lines if line.category is None]
    return comparison.table("Figure 5: score and speedup of every method", heads, lines)


def first_token(comparison: Comparison) -> Table:
    """Figure 1: how long the first token takes, in decode steps and as a share of the answer, run densely."""
    rows = comparison.summary.timed(DENSE_LABEL)
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
    deviation = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{deviation}{unit}"
