"""The paper's tables for a run, with the paper's results for the same model beside them; and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lazyllm.evaluation.longbench.datasets import CATEGORIES
from lazyllm.evaluation.report import cell
from lazyllm.evaluation.summary import DENSE_LABEL, NO_SPEED, Summary, token_use_by_setting
from lazyllm.llm import LLM
from lazyllm.pictures.figure import panel_grid, save, series
from lazyllm.pictures.panels import plot_token_use
from lazyllm.pruning import Pruning
from lazyllm.reproduce.paper import BASELINE, FIRST_TOKEN, Published
from lazyllm.support.tables import Table

COLUMNS = 4
QUANTILES = tuple(range(0, 101, 2))  # percent
LOWEST_SHARE = 1e-2  # of a uniform share: the lower end of Figure 2's colours
ALL = "All"
POOLED = "scores are means of data sets, shares and speedups are of all items together"
SCORE, DIFFERENCE = "score [95 %]", "paired difference [95 %]"
FIRST, WHOLE = "TTFT speedup", "generation speedup"
COMPUTED, TOP = "prompt computed", "prompt that reached the top"
LAYOUTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "table1": (
        "Table 1: accuracy and speedup of the first token",
        ["category", "method", SCORE, DIFFERENCE, FIRST, "paper: score", f"paper: {FIRST}"],
    ),
    "table2": (
        "Table 2: prompt tokens computed, and speedup of whole answers",
        ["category", "method", COMPUTED, TOP, WHOLE, f"paper: {COMPUTED}", f"paper: {WHOLE}"],
    ),
    "figure5": (
        "Figure 5: score and speedup of every method",
        ["category", "counted speedup", "method", SCORE, DIFFERENCE, FIRST, WHOLE, COMPUTED],
    ),
}
"""Tables by their title and their columns."""


@dataclass(frozen=True)
class Comparison:
    """A run. `settings` are the labels of those that are shown as one, which differ by seed: by counted
    speedup and method, or in Figure 6 by layer and keep. Dense is none of them."""

    summary: Summary
    settings: Mapping[tuple[str, str], Sequence[str]]
    published: Published

    @property
    def groups(self) -> list[tuple[str | None, Sequence[str]]]:
        """Each category with its data sets; None with all of them."""
        return [*self.summary.categories.items(), (None, self.summary.datasets)]

    def scores(self, labels: Sequence[str], category: str | None) -> list[float]:
        return [self.summary.mean(label, category).value for label in labels]

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

        def share(field: str) -> str:
            return f"{np.mean([summary.average(label, field, datasets) for label in labels]):.2%}"

        row = {
            "category": f"{place} ({n_run} of {n_all} data sets)" if is_part else place,
            "counted speedup": counted,
            "method": method,
            SCORE: spread(self.scores(labels, category)) if others else cell(summary.mean(first, category)),
            DIFFERENCE: "" if others or not counted else cell(summary.difference(first, category), "+.2f"),
            FIRST: spread(self.speedups(labels, "ttft", datasets), "x"),
            WHOLE: spread(self.speedups(labels, "seconds", datasets), "x"),
            COMPUTED: share("computed"),
            TOP: share("reached_top"),
        }
        paper = self.published.get((place, method), {})
        return row | {f"paper: {head}": text for head, text in paper.items()}

    def table(self, target: str) -> Table:
        """The table of a layout, without the paper's columns if it has no results for the model."""
        title, heads = LAYOUTS[target]
        heads = [head for head in heads if self.published or not head.startswith("paper: ")]
        named = {("", BASELINE): [DENSE_LABEL], **self.settings}
        rows = [self.row(*group, *name, labels) for group in self.groups for name, labels in named.items()]
        return Table(f"{title} ({POOLED})", heads, [[row.get(head, "") for head in heads] for row in rows])


def first_token(summary: Summary) -> Table:
    """Figure 1: how long the first token takes, in decode steps and as a share of the answer, run densely."""
    rows = summary.timed(DENSE_LABEL)
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


# ---- figures; all need matplotlib --------------------------------------------------------------------


def attention(llm: LLM, prompts: Sequence[Sequence[int]], model: str, file: Path) -> Path:
    """Figure 2: the last token's attention to the others, sorted, in every layer except the top one, whose
    scores no stage computes, and in the mean of these layers; means over the prompts."""
    from matplotlib.colors import LogNorm

    every_layer = Pruning(dict.fromkeys(range(llm.config.n_layers - 1), 1.0))
    looks = []
    for ids in prompts:
        answer = llm.generate(list(ids), every_layer, max_new_tokens=1, trace=True, progress=False)
        scores = np.array([stage.scores for stage in answer.trace.stages])  # (layers, tokens)
        with_mean = np.vstack([scores, scores.mean(axis=0)]) * len(ids)  # multiples of a uniform share
        looks.append(np.percentile(with_mean, QUANTILES, axis=1).T)
    *quantiles, means = np.maximum(np.mean(looks, axis=0), LOWEST_SHARE)
    figure, (left, right) = panel_grid(2, 2, 16 / 3, 5)
    image = left.imshow(
        quantiles,
        aspect="auto",
        origin="lower",
        norm=LogNorm(LOWEST_SHARE, np.max(quantiles)),
        extent=(QUANTILES[0], QUANTILES[-1], -0.5, len(quantiles) - 0.5),
    )
    figure.colorbar(image, ax=left, label="attention, multiples of a uniform share")
    right.semilogy(QUANTILES, means)
    right.grid(alpha=0.3)
    for axes, label in ((left, "layer"), (right, "mean attention over layers, multiples of a uniform share")):
        axes.set(xlabel="prompt tokens from the least to the most attended, percent", ylabel=label)
    figure.suptitle(f"Figure 2: attention of the last prompt token, {model}, mean of {len(looks)} prompts")
    return save(figure, file)


LINES = {
    "figure5": ("Figure 5: score against the speedup of the first token", "speedup of the first token"),
    "figure6": ("Figure 6: where tokens are dropped, and how many", "layer after which tokens are dropped"),
}
"""Figures by their title and their horizontal axis."""


def plot_lines(comparison: Comparison, target: str, model: str, file: Path) -> Path:
    """Figures 5 and 6: scores by measured speedup or by layer, with a panel for each category, and a line for
    each method or keep; means over seeds. Markers get smaller, so that all at a place are seen."""
    title, x_label = LINES[target]
    figure, panels = panel_grid(len(comparison.groups), COLUMNS, 4.2, 3.6)
    for axes, (category, datasets) in zip(panels, comparison.groups, strict=True):
        dense = comparison.summary.mean(DENSE_LABEL, category).value
        axes.axhline(dense, color="black", linewidth=0.8, linestyle=":", label=BASELINE)
        lines: dict[str, list[tuple[float, float]]] = {}
        for (place, method), labels in comparison.settings.items():
            values = [float(place)] if place.isdecimal() else comparison.speedups(labels, "ttft", datasets)
            if values:
                point = float(np.mean(values)), float(np.mean(comparison.scores(labels, category)))
                lines.setdefault(method, []).append(point)
        for number, (method, points) in enumerate(lines.items()):
            look = {**series(number), "markersize": 3 + len(lines) - number}
            axes.plot(*zip(*sorted(points), strict=True), **look, label=method)
        axes.set(title=category or ALL, xlabel=x_label, ylabel="score")
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=COLUMNS - 1)
    figure.suptitle(f"{title}, {model}")
    return save(figure, file)


def token_use(summary: Summary, file: Path) -> Path:
    """Figure 7: the share of the prompt that each layer has computed, by new token."""
    panels = token_use_by_setting(summary.rows)
    if not panels:
        raise ValueError("Figure 7 needs a method that prunes layers, and items that are long enough for it")
    return plot_token_use(panels, file)
