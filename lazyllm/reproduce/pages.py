"""The paper's tables for a run, with the paper's results for the same model beside them; and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lazyllm.evaluation.longbench.datasets import CATEGORIES
from lazyllm.evaluation.report import cell
from lazyllm.evaluation.summary import DENSE_LABEL, NO_SPEED, Row, Summary, mean
from lazyllm.pictures.figure import panel_grid, save, series
from lazyllm.reproduce.paper import BASELINE, Published
from lazyllm.support.tables import Table

COLUMNS = 4
ALL = "All"
POOLED = "scores are means of data sets, shares and speedups are of all items together"
SCORE, DIFFERENCE = "score [95 %]", "paired difference [95 %]"
FIRST, WHOLE = "TTFT speedup", "generation speedup"
COMPUTED, TOP = "prompt computed", "prompt that reached the top"
FIRST_TOKEN = ("prompt tokens", "new tokens", "first token's time, in decode steps", "first token's share of the time")
LAYOUTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "table1": (
        "Table 1: accuracy and speedup of the first token",
        ["category", "method", SCORE, DIFFERENCE, FIRST, "paper: score", f"paper: {FIRST}"],
    ),
    "table2": (
        "Table 2: prompt tokens computed, and speedup of whole answers",
        ["category", "method", COMPUTED, TOP, WHOLE, f"paper: {COMPUTED}", f"paper: {WHOLE}"],
    ),
    "figure1": (
        "Figure 1: the first token's time, dense; in the paper, of Llama 2 7B, 21 steps and 23 % at 3376 and 68 tokens",
        ["category", *FIRST_TOKEN],
    ),
    "figure5": (
        "Figure 5: score and speedup of every method",
        ["category", "counted speedup", "method", SCORE, DIFFERENCE, FIRST, WHOLE, COMPUTED],
    ),
}
"""Tables by their title and their columns."""


@dataclass(frozen=True)
class Comparison:
    """A run. `settings` has, by counted speedup and method, or in Figure 6 by layer and keep, the labels of
    settings that are shown as one because they differ only by seed. Dense is not among them."""

    summary: Summary
    settings: Mapping[tuple[str, str], Sequence[str]]
    published: Published

    @property
    def groups(self) -> list[tuple[str | None, Sequence[str]]]:
        """Each category with its data sets; None with all of them."""
        return [*self.summary.categories.items(), (None, self.summary.datasets)]

    def speedups(self, labels: Sequence[str], timing: str, datasets: Sequence[str]) -> list[float]:
        """The speedups of the settings that have one."""
        speeds = (self.summary.speed(label, timing, datasets) for label in labels)
        return [speed.of_sums for speed in speeds if speed != NO_SPEED]

    def row(
        self, category: str | None, datasets: Sequence[str], counted: str, method: str, labels: Sequence[str]
    ) -> dict[str, str]:
        """The cells of a method by column. Over seeds, a score has its deviation in place of an interval."""
        place, summary, (first, *others) = category or ALL, self.summary, labels
        n_run, n_all = len(datasets), len(CATEGORIES.get(place, ()))
        is_part = self.published and n_run < n_all
        scores = [summary.mean(label, category) for label in labels]

        def share(field: str) -> str:
            return f"{np.mean([mean(summary.values(label, field, datasets)) for label in labels]):.2%}"

        row = {
            "category": f"{place} ({n_run} of {n_all} data sets)" if is_part else place,
            "counted speedup": counted,
            "method": method,
            SCORE: spread([score.value for score in scores]) if others else cell(scores[0]),
            DIFFERENCE: "" if others or not counted else cell(summary.difference(first, category), "+.2f"),
            FIRST: spread(self.speedups(labels, "ttft", datasets), "x"),
            WHOLE: spread(self.speedups(labels, "seconds", datasets), "x"),
            COMPUTED: share("computed"),
            TOP: share("reached_top"),
        }
        if method == BASELINE and (timed := [item for item in summary.timed(first) if item["dataset"] in datasets]):
            row |= first_token(timed)
        paper = self.published.get((place, method), {})
        return row | {f"paper: {head}": text for head, text in paper.items()}

    def table(self, target: str) -> Table:
        """The table of a layout, without the paper's columns if it has no results for the model."""
        title, heads = LAYOUTS[target]
        heads = [head for head in heads if self.published or not head.startswith("paper: ")]
        named = {("", BASELINE): [DENSE_LABEL], **self.settings}
        rows = [self.row(*group, *name, labels) for group in self.groups for name, labels in named.items()]
        return Table(f"{title} ({POOLED})", heads, [[row.get(head, "") for head in heads] for row in rows])


def first_token(rows: Sequence[Row]) -> dict[str, str]:
    """How long the first token takes, in decode steps and as a share of the answers."""
    first, whole = (sum(row["timing"][name] for row in rows) for name in ("ttft", "seconds"))
    n_steps = sum(row["new_tokens"] - 1 for row in rows)
    step = (whole - first) / n_steps if n_steps else np.nan
    means = [f"{np.mean([row[name] for row in rows]):.0f}" for name in ("prompt_tokens", "new_tokens")]
    return dict(
        zip(FIRST_TOKEN, [*means, f"{first / len(rows) / step:.1f}", f"{100 * first / whole:.0f} %"], strict=True)
    )


def spread(values: Sequence[float], unit: str = "") -> str:
    """A single value, or mean and standard deviation over seeds."""
    if not values or np.isnan(values).any():
        return ""
    deviation = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{deviation}{unit}"


# ---- figures; they need matplotlib -------------------------------------------------------------------


LINES = {
    "figure5": ("Figure 5: score against the speedup of the first token", "speedup of the first token"),
    "figure6": ("Figure 6: where tokens are dropped, and how many", "layer after which tokens are dropped"),
}
"""Figures by their title and their horizontal axis."""


def plot_lines(comparison: Comparison, target: str, model: str, file: Path) -> Path:
    """Figures 5 and 6: scores by measured speedup or by layer, with a panel for each category, and a line for
    each method or keep; means over seeds. Later markers are smaller, so that none hides another."""
    title, x_label = LINES[target]
    figure, panels = panel_grid(len(comparison.groups), COLUMNS, 4.2, 3.6)
    for axes, (category, datasets) in zip(panels, comparison.groups, strict=True):
        dense = comparison.summary.mean(DENSE_LABEL, category).value
        axes.axhline(dense, color="black", linewidth=0.8, linestyle=":", label=BASELINE)
        lines: dict[str, list[tuple[float, float]]] = {}
        for (place, method), labels in comparison.settings.items():
            values = [float(place)] if place.isdecimal() else comparison.speedups(labels, "ttft", datasets)
            if values:
                scores = [comparison.summary.mean(label, category).value for label in labels]
                lines.setdefault(method, []).append((float(np.mean(values)), float(np.mean(scores))))
        for number, (method, points) in enumerate(lines.items()):
            look = {**series(number), "markersize": 3 + len(lines) - number}
            axes.plot(*zip(*sorted(points), strict=True), **look, label=method)
        axes.set(title=category or ALL, xlabel=x_label, ylabel="score")
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=COLUMNS - 1)
    figure.suptitle(f"{title}, {model}")
    return save(figure, file)
