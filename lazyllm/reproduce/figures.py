"""The paper's figures, of runs; all need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.longbench.summary import DENSE, Summary
from lazyllm.picture import new_figure
from lazyllm.reproduce.attention import MASSES, QUANTILES, mean_over
from lazyllm.reproduce.rivals import BASELINE
from lazyllm.reproduce.tables import ALL, Labels, score_of, speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI, ABREAST, PANEL_WIDTH, PANEL_HEIGHT = 150, 4, 4.2, 3.6
LOWEST_SHARE = 1e-2  # of an even share, the darkest of Figure 2


def attention(rows: Sequence[Mapping[str, Any]], title: str, file: Path) -> Path:
    """Figure 2: the last prompt token's attention to the others, sorted, in every layer."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(12, 5)
    left, right = figure.subplots(1, 2)
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
    figure.colorbar(image, ax=left, label="attention, multiples of an even share")
    for column, mass in enumerate(MASSES):
        right.plot(range(len(holds)), holds[:, column], marker=".", label=f"{mass:.0%} of the attention")
    right.set_xlabel("layer")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_ylabel("prompt tokens that hold it, percent")
    right.set_ylim(0, 103)
    right.grid(alpha=0.3)
    right.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(file, dpi=DPI)
    return file


def pareto(summary: Summary, several: Sequence[Labels], title: str, file: Path) -> Path:
    """Figure 5: score against the speedup of the first token, a panel a category, a line a method."""
    groups = [*summary.categories.items(), (ALL, summary.datasets)]
    below = -(-len(groups) // ABREAST)
    figure = new_figure(PANEL_WIDTH * min(ABREAST, len(groups)), PANEL_HEIGHT * below)
    panels = figure.subplots(below, min(ABREAST, len(groups)), squeeze=False).flat
    for axes, (category, names) in zip(panels, groups, strict=False):
        axes.axhline(score_of(summary, DENSE, category), color="black", linewidth=0.8, linestyle=":")
        axes.plot(1, score_of(summary, DENSE, category), "s", color="black", label=BASELINE)
        for method in several[0]:
            draw_method(axes, summary, [labels[method] for labels in several], category, names, method)
        axes.set_title(category)
        axes.set_xlabel("speedup of the first token")
        axes.set_ylabel("score")
        axes.grid(alpha=0.3)
    for axes in list(panels):
        axes.set_visible(False)
    handles, told = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, told, loc="outside lower center", ncols=ABREAST - 1)
    figure.suptitle(title)
    figure.savefig(file, dpi=DPI)
    return file


def draw_method(
    axes: Axes,
    summary: Summary,
    points: Sequence[Sequence[str]],
    category: str,
    names: Sequence[str],
    method: str,
) -> None:
    """A point a strength: means over seeds."""
    places = []
    for settings in points:
        speeds = [speed for one in settings if (speed := speedup(summary, one, "ttft", names))]
        if speeds:
            places.append((np.mean(speeds), np.mean([score_of(summary, one, category) for one in settings])))
    if places:
        axes.plot(*zip(*sorted(places), strict=True), marker="o", markersize=4, label=method)


def places(summary: Summary, labels: Mapping[tuple[int, float], str], title: str, file: Path) -> Path:
    """Figure 6: score against the layer that drops tokens, a line for each share that it keeps."""
    figure = new_figure(7, 5)
    axes = figure.subplots()
    axes.axhline(summary.mean_score(DENSE), color="black", linewidth=0.8, linestyle=":", label=BASELINE)
    keeps = list(dict.fromkeys(keep for _, keep in labels))
    for place, keep in enumerate(keeps):
        points = [
            (layer, summary.mean_score(label)) for (layer, kept), label in labels.items() if kept == keep
        ]
        axes.plot(
            *zip(*sorted(points), strict=True),
            marker="o",
            markersize=2 + 2 * (len(keeps) - place),  # a point on another lets it be seen
            label=f"keep {keep:.0%} tokens",
        )
    axes.set_xlabel("layer after which tokens are dropped")
    axes.set_ylabel("score, mean of the categories")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=DPI)
    return file
