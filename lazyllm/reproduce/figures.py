"""The paper's figures for a run; all need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.evaluation.summary import DENSE, Summary
from lazyllm.pictures.figure import new_figure, panel_grid, save, series
from lazyllm.reproduce.attention import MASSES, QUANTILES, mean_over
from lazyllm.reproduce.rivals import BASELINE
from lazyllm.reproduce.tables import ALL, Labels, score_of, speedup

COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 4, 4.2, 3.6
LOWEST_SHARE = 1e-2  # of a uniform share: the lower end of Figure 2's colours


def attention(rows: Sequence[Mapping[str, Any]], title: str, file: Path) -> Path:
    """Figure 2: the last prompt token's attention to the others, sorted, in every layer and in the mean."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(16, 5)
    left, right, last = figure.subplots(1, 3)
    quantiles, holds = mean_over(rows, "quantiles"), 100 * mean_over(rows, "holds")
    image = left.imshow(
        np.maximum(quantiles, LOWEST_SHARE),
        aspect="auto",
        origin="lower",
        norm=LogNorm(LOWEST_SHARE, quantiles.max()),
        extent=(QUANTILES[0], QUANTILES[-1], -0.5, len(quantiles) - 0.5),
    )
    left.set_xlabel("prompt tokens from the least to the most attended, percent")
    left.set_ylabel("layer")
    figure.colorbar(image, ax=left, label="attention, multiples of a uniform share")
    for column, mass in enumerate(MASSES):
        label = f"{mass:.0%} of the attention"
        right.plot(range(len(holds)), holds[:, column], **series(column), markersize=4, label=label)
    right.set_xlabel("layer")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_ylabel("prompt tokens that hold it, percent")
    right.set_ylim(0, 103)
    right.grid(alpha=0.3)
    right.legend(fontsize="small")
    last.plot(QUANTILES, np.maximum(mean_over(rows, "quantiles_of_means"), LOWEST_SHARE))
    last.set_yscale("log")
    last.set_xlabel("prompt tokens from the least to the most attended, percent")
    last.set_ylabel("mean attention over layers, multiples of a uniform share")
    last.grid(alpha=0.3)
    figure.suptitle(title)
    return save(figure, file)


def pareto(summary: Summary, strengths: Sequence[Labels], title: str, file: Path) -> Path:
    """Figure 5: score against the speedup of the first token, one panel per category, one line per method."""
    groups = [*summary.categories.items(), (ALL, summary.datasets)]
    figure, panels = panel_grid(len(groups), COLUMNS, PANEL_WIDTH, PANEL_HEIGHT)
    for axes, (category, names) in zip(panels, groups, strict=True):
        axes.axhline(score_of(summary, DENSE, category), color="black", linewidth=0.8, linestyle=":")
        axes.plot(1, score_of(summary, DENSE, category), "s", color="black", label=BASELINE)
        for place, method in enumerate(strengths[0]):
            dots = points(summary, [one[method] for one in strengths], category, names)
            if dots:
                axes.plot(*zip(*sorted(dots), strict=True), **series(place), markersize=5, label=method)
        axes.set_title(category)
        axes.set_xlabel("speedup of the first token")
        axes.set_ylabel("score")
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=COLUMNS - 1)
    figure.suptitle(title)
    return save(figure, file)


def points(
    summary: Summary, strengths: Sequence[Sequence[str]], category: str, names: Sequence[str]
) -> list[tuple[float, float]]:
    """By strength of a method: speedup and score, the means over seeds."""
    made = []
    for settings in strengths:
        speeds = [speed for one in settings if (speed := speedup(summary, one, "ttft", names))]
        if speeds:
            scores = [score_of(summary, one, category) for one in settings]
            made.append((float(np.mean(speeds)), float(np.mean(scores))))
    return made


def places(summary: Summary, labels: Mapping[tuple[int, float], str], title: str, file: Path) -> Path:
    """Figure 6: score against the layer after which tokens are dropped, one line per keep."""
    figure = new_figure(7, 5)
    axes = figure.subplots()
    axes.axhline(summary.mean_score(DENSE), color="black", linewidth=0.8, linestyle=":", label=BASELINE)
    keeps = list(dict.fromkeys(keep for _, keep in labels))
    for place, keep in enumerate(keeps):
        found = [
            (layer, summary.mean_score(label)) for (layer, kept), label in labels.items() if kept == keep
        ]
        axes.plot(
            *zip(*sorted(found), strict=True),
            **series(place),
            markersize=3 + 2 * (len(keeps) - place),  # points at the same place stay visible
            label=f"keep {keep:.0%} tokens",
        )
    axes.set_xlabel("layer after which tokens are dropped")
    axes.set_ylabel("score, mean of the categories")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return save(figure, file)
