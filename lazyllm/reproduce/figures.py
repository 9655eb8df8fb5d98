"""The paper's figures for a run; all need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.evaluation.summary import DENSE_LABEL, token_use_by_setting
from lazyllm.llm import LLM
from lazyllm.pictures.figure import panel_grid, save, series
from lazyllm.pictures.panels import plot_token_use
from lazyllm.pruning import Pruning
from lazyllm.reproduce.paper import BASELINE, LAZY, RECOMMENDED
from lazyllm.reproduce.tables import ALL, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 4
MASSES = (0.5, 0.9, 0.99)
QUANTILES = tuple(range(0, 101, 2))  # percent
LOWEST_SHARE = 1e-2  # of a uniform share: the lower end of Figure 2's colours
Lines = Mapping[str, Sequence[tuple[float, float]]]
"""By label: points (x, y)."""


def share_that_holds(scores: np.ndarray, mass: float) -> float:
    """The smallest share of the tokens that holds the share `mass` of all scores."""
    falling = np.sort(scores.astype(np.float64))[::-1].cumsum()
    needed: int = np.searchsorted(falling, mass * falling[-1] * (1 - 1e-12)) + 1
    return needed / len(scores)


def draw(axes: Axes, lines: Lines, **about: Any) -> None:
    """Draws each line with a marker for each point; they get smaller, so that all points at a place are
    seen."""
    for place, (label, points) in enumerate(lines.items()):
        size = 3 + len(lines) - place
        axes.plot(*zip(*sorted(points), strict=True), **series(place), markersize=size, label=label)
    axes.set(**about)
    axes.grid(alpha=0.3)


def attention(llm: LLM, prompts: Sequence[Sequence[int]], model: str, file: Path) -> Path:
    """Figure 2: the last token's attention to the others, sorted, in every layer except the top one, whose
    scores no stage computes, and in the mean of these layers; means over the prompts."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    every_layer = Pruning(dict.fromkeys(range(llm.config.n_layers - 1), 1.0))
    looks = []
    for ids in prompts:
        answer = llm.generate(list(ids), every_layer, max_new_tokens=1, trace=True, progress=False)
        scores = np.array([stage.scores for stage in answer.trace.stages])  # (layers, tokens)
        with_mean = np.vstack([scores, scores.mean(axis=0)]) * len(ids)  # multiples of a uniform share
        holds = [[100 * share_that_holds(layer, mass) for layer in scores] for mass in MASSES]
        looks.append((np.percentile(with_mean, QUANTILES, axis=1).T, holds))
    (*quantiles, means), holds = (np.mean(look, axis=0) for look in zip(*looks, strict=True))
    figure, (left, middle, right) = panel_grid(3, 3, 16 / 3, 5)
    image = left.imshow(
        np.maximum(quantiles, LOWEST_SHARE),
        aspect="auto",
        origin="lower",
        norm=LogNorm(LOWEST_SHARE, np.max(quantiles)),
        extent=(QUANTILES[0], QUANTILES[-1], -0.5, len(quantiles) - 0.5),
    )
    figure.colorbar(image, ax=left, label="attention, multiples of a uniform share")
    shares = {f"{m:.0%} of the attention": [*enumerate(held)] for m, held in zip(MASSES, holds, strict=True)}
    draw(middle, shares, xlabel="layer", ylabel="prompt tokens that hold it, percent", ylim=(0, 103))
    middle.xaxis.set_major_locator(MaxNLocator(integer=True))
    middle.legend(fontsize="small")
    right.semilogy(QUANTILES, np.maximum(means, LOWEST_SHARE))
    right.grid(alpha=0.3)
    for axes, label in ((left, "layer"), (right, "mean attention over layers, multiples of a uniform share")):
        axes.set(xlabel="prompt tokens from the least to the most attended, percent", ylabel=label)
    figure.suptitle(f"Figure 2: attention of the last prompt token, {model}, mean of {len(looks)} prompts")
    return save(figure, file)


def pareto(comparison: Comparison, model: str, file: Path) -> Path:
    """Figure 5: score against the speedup of the first token, one panel per category, one line per method;
    means over seeds."""
    dense = {line.category: line.scores()[0] for line in comparison.lines if line.method == BASELINE}
    figure, panels = panel_grid(len(dense), COLUMNS, 4.2, 3.6)
    for axes, (category, score) in zip(panels, dense.items(), strict=True):
        axes.axhline(score, color="black", linewidth=0.8, linestyle=":")
        points: dict[str, list[tuple[float, float]]] = {}
        for line in comparison.lines:
            if line.category == category and (speeds := line.speedups("ttft")):
                point = float(np.mean(speeds)), float(np.mean(line.scores()))
                points.setdefault(line.method, []).append(point)
        draw(axes, points, title=category or ALL, xlabel="speedup of the first token", ylabel="score")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=COLUMNS - 1)
    figure.suptitle(f"Figure 5: score against the speedup of the first token, {model}")
    return save(figure, file)


def places(comparison: Comparison, model: str, file: Path) -> Path:
    """Figure 6: score against the layer after which tokens are dropped, one line per keep."""
    points: dict[str, list[tuple[float, float]]] = {}
    for (keep, layer), (label,) in comparison.settings.items():
        points.setdefault(keep, []).append((int(layer), comparison.summary.mean(label).value))
    figure, (axes,) = panel_grid(1, 1, 7, 5)
    axes.axhline(comparison.summary.mean(DENSE_LABEL).value, color="black", linestyle=":", label=BASELINE)
    draw(axes, points, xlabel="layer after which tokens are dropped", ylabel="score, mean of the categories")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Figure 6: where tokens are dropped, and how many, {model}")
    axes.legend(fontsize="small")
    return save(figure, file)


def token_use(comparison: Comparison, model: str, file: Path) -> Path:
    """Figure 7: the share of the prompt that each layer has computed, by new token."""
    shares = token_use_by_setting(comparison.summary.rows)
    lazy = [label for line in comparison.lines if line.method in (LAZY, RECOMMENDED) for label in line.labels]
    panels = {label: shares[label] for label in lazy if label in shares}
    if not panels:
        raise ValueError("Figure 7 needs an item that the method prunes, and no item here is long enough")
    return plot_token_use(panels, file)
