"""The paper's figures for a run; all need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.evaluation.summary import DENSE_LABEL
from lazyllm.evaluation.tasks import Tasks
from lazyllm.evaluation.token_use import token_use_by_setting
from lazyllm.evaluation.trial import Trial
from lazyllm.llm import LLM
from lazyllm.pictures.figure import new_figure, panel_grid, save, series
from lazyllm.pictures.token_use import plot_token_use
from lazyllm.pruning import Pruning
from lazyllm.reproduce.rivals import BASELINE, LAZY, RECOMMENDED
from lazyllm.reproduce.tables import Results

COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 4, 4.2, 3.6
MASSES = (0.5, 0.9, 0.99)
QUANTILES = tuple(range(0, 101, 2))  # percent
LOWEST_SHARE = 1e-2  # of a uniform share: the lower end of Figure 2's colours


def attention_of(llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
    """A measure of the runner: attention of the prompt's last token."""
    return attention_scores(llm, tasks.prompt(llm, trial.task, trial.item).ids)


def attention_scores(llm: LLM, ids: Sequence[int]) -> dict[str, Any]:
    """For each layer except the top one, whose scores no stage computes: quantiles of the scores, as
    multiples of a uniform share, and the smallest share of the prompt that holds each of MASSES of the
    attention. Also quantiles of the tokens' mean over these layers."""
    every_layer = Pruning(dict.fromkeys(range(llm.config.n_layers - 1), 1.0))
    answer = llm.generate(list(ids), pruning=every_layer, max_new_tokens=1, trace=True, progress=False)
    scores = np.array([stage.scores for stage in answer.trace.stages])

    def quantiles(values: np.ndarray) -> Any:
        return np.percentile(values * len(ids), QUANTILES, axis=-1).T.round(5).tolist()

    return {
        "prompt_tokens": len(ids),
        "quantiles": quantiles(scores),
        "quantiles_of_means": quantiles(scores.mean(axis=0)),
        "holds": [[round(share_that_holds(layer, mass), 5) for mass in MASSES] for layer in scores],
    }


def share_that_holds(scores: np.ndarray, mass: float) -> float:
    """The smallest share of the tokens that holds the share `mass` of all scores."""
    falling = np.sort(scores.astype(np.float64))[::-1].cumsum()
    needed: int = np.searchsorted(falling, mass * falling[-1] * (1 - 1e-12)) + 1
    return needed / len(scores)


def attention(results: Results, title: str, file: Path) -> Path:
    """Figure 2: the last prompt token's attention to the others, sorted, in every layer and in the mean."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    rows = results.summary.rows
    quantiles, means, holds = (
        np.mean([row[field] for row in rows], axis=0)
        for field in ("quantiles", "quantiles_of_means", "holds")
    )
    figure = new_figure(16, 5)
    left, right, last = figure.subplots(1, 3)
    image = left.imshow(
        np.maximum(quantiles, LOWEST_SHARE),
        aspect="auto",
        origin="lower",
        norm=LogNorm(LOWEST_SHARE, quantiles.max()),
        extent=(QUANTILES[0], QUANTILES[-1], -0.5, len(quantiles) - 0.5),
    )
    sorted_tokens = "prompt tokens from the least to the most attended, percent"
    left.set(xlabel=sorted_tokens, ylabel="layer")
    figure.colorbar(image, ax=left, label="attention, multiples of a uniform share")
    for column, mass in enumerate(MASSES):
        label = f"{mass:.0%} of the attention"
        right.plot(range(len(holds)), 100 * holds[:, column], **series(column), markersize=4, label=label)
    right.set(xlabel="layer", ylabel="prompt tokens that hold it, percent", ylim=(0, 103))
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.grid(alpha=0.3)
    right.legend(fontsize="small")
    last.plot(QUANTILES, np.maximum(means, LOWEST_SHARE))
    last.set(xlabel=sorted_tokens, ylabel="mean attention over layers, multiples of a uniform share")
    last.set_yscale("log")
    last.grid(alpha=0.3)
    figure.suptitle(f"{title}, mean of {len(rows)} prompts")
    return save(figure, file)


def pareto(results: Results, title: str, file: Path) -> Path:
    """Figure 5: score against the speedup of the first token, one panel per category, one line per method;
    means over seeds."""
    figure, panels = panel_grid(len(results.groups), COLUMNS, PANEL_WIDTH, PANEL_HEIGHT)
    for axes, (category, names) in zip(panels, results.groups, strict=True):
        dots: dict[str, list[tuple[float, float]]] = {}
        for _, method, settings in results.methods[1:]:
            line = dots.setdefault(method, [])
            if speeds := results.speedups(settings, names):
                scores = [results.score(setting, category) for setting in settings]
                line.append((float(np.mean(speeds)), float(np.mean(scores))))
        axes.axhline(results.score(DENSE_LABEL, category), color="black", linewidth=0.8, linestyle=":")
        axes.plot(1, results.score(DENSE_LABEL, category), "s", color="black", label=BASELINE)
        for place, (method, line) in enumerate(dots.items()):
            if line:
                axes.plot(*zip(*sorted(line), strict=True), **series(place), markersize=5, label=method)
        axes.set(title=category, xlabel="speedup of the first token", ylabel="score")
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=COLUMNS - 1)
    figure.suptitle(title)
    return save(figure, file)


def places(results: Results, title: str, file: Path) -> Path:
    """Figure 6: score against the layer after which tokens are dropped, one line per keep."""
    score = results.summary.mean_score
    figure = new_figure(7, 5)
    axes = figure.subplots()
    axes.axhline(score(DENSE_LABEL), color="black", linewidth=0.8, linestyle=":", label=BASELINE)
    keeps = list(dict.fromkeys(keep for keep, _ in results.settings))
    for place, keep in enumerate(keeps):
        line = [(layer, score(label)) for (kept, layer), (label,) in results.settings.items() if kept == keep]
        axes.plot(
            *zip(*sorted(line), strict=True),
            **series(place),
            markersize=3 + 2 * (len(keeps) - place),  # points at the same place stay visible
            label=f"keep {keep:.0%} tokens",
        )
    axes.set(
        xlabel="layer after which tokens are dropped", ylabel="score, mean of the categories", title=title
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return save(figure, file)


def token_use(results: Results, title: str, file: Path) -> Path:
    """Figure 7: the share of the prompt that each layer has computed, by new token."""
    shares = token_use_by_setting(results.summary.rows)
    labels = [
        label
        for _, method, settings in results.methods
        if method in (LAZY, RECOMMENDED)
        for label in settings
    ]
    panels = {label: shares[label] for label in labels if label in shares}
    if not panels:
        raise ValueError("Figure 7 needs an item that the method prunes, and no item here is long enough")
    return plot_token_use(panels, file)
