"""The paper's tables for a run, with the paper's results for the same model beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lazyllm.evaluation.longbench.datasets import CATEGORIES
from lazyllm.evaluation.report import cell
from lazyllm.evaluation.summary import DENSE_LABEL, NO_SPEED, Summary
from lazyllm.reproduce.paper import BASELINE, FIRST_TOKEN, LAZY, Published
from lazyllm.support.tables import Table

ALL = "All"
POOLED = "scores are means of data sets, shares and speedups are of all items together"


DIFFERENCE, COMPUTED = "paired difference [95 %]", "prompt computed"
FIRST, WHOLE = "TTFT speedup", "generation speedup"
LAYOUTS: Mapping[str, tuple[str, Mapping[str, str], Sequence[str]]] = {
    "table1": (
        "Table 1: accuracy and speedup of the first token",
        {},
        ["category", "method", "score", DIFFERENCE, FIRST, "paper: score", f"paper: {FIRST}"],
    ),
    "table2": (
        "Table 2: prompt tokens computed, and speedup of whole answers",
        {"method": LAZY},
        ["category", COMPUTED, "prompt that reached the top", WHOLE, f"paper: {COMPUTED}", f"paper: {WHOLE}"],
    ),
    "figure5": (
        "Figure 5: score and speedup of every method",
        {"category": ALL},
        ["counted speedup", "method", "score [95 %]", DIFFERENCE, FIRST, WHOLE, COMPUTED],
    ),
}
"""Tables by their title, the cells that all their rows have, and their columns."""


@dataclass(frozen=True)
class Comparison:
    """A run. `settings` are the labels of those that are shown as one, which differ by seed: by counted
    speedup and method, or in Figure 6 by keep and layer. Dense is none of them."""

    summary: Summary
    settings: Mapping[tuple[str, str], Sequence[str]]
    published: Published

    @property
    def groups(self) -> list[tuple[str | None, Sequence[str]]]:
        """Each category with its data sets; None with all of them."""
        return [*self.summary.categories.items(), (None, self.summary.datasets)]

    @property
    def with_dense(self) -> list[tuple[tuple[str, str], Sequence[str]]]:
        return [(("", BASELINE), [DENSE_LABEL]), *self.settings.items()]

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
        score = spread(self.scores(labels, category))
        difference = "" if others or method == BASELINE else cell(summary.difference(first, category), "+.2f")

        def share(field: str) -> str:
            return f"{np.mean([summary.average(label, field, datasets) for label in labels]):.2%}"

        row = {
            "category": f"{place} ({n_run} of {n_all} data sets)" if is_part else place,
            "counted speedup": counted,
            "method": method,
            "score": score,
            "score [95 %]": score if others else cell(summary.mean(first, category)),
            DIFFERENCE: difference,
            FIRST: spread(self.speedups(labels, "ttft", datasets), "x"),
            WHOLE: spread(self.speedups(labels, "seconds", datasets), "x"),
            COMPUTED: share("computed"),
            "prompt that reached the top": share("reached_top"),
        }
        paper = self.published.get((place, method), {})
        return row | {f"paper: {head}": text for head, text in paper.items()}

    def table(self, target: str) -> Table:
        """The table of a layout, without the paper's columns if it has no results for the model."""
        title, cells, heads = LAYOUTS[target]
        heads = [head for head in heads if self.published or not head.startswith("paper: ")]
        rows = [self.row(*group, *name, labels) for group in self.groups for name, labels in self.with_dense]
        shown = [row for row in rows if cells.items() <= row.items()]
        return Table(f"{title} ({POOLED})", heads, [[row.get(head, "") for head in heads] for row in shown])


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
