"""Token use: how much of the prompt each layer has computed, new token by new token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.generation import Generation
from lazyllm.methods import Method
from lazyllm.picture import new_figure
from lazyllm.pruning import Pruning

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, DPI = 5, 4, 150
MOST_ABREAST, TITLE_WIDTH = 4, 56
Rows = Sequence[Mapping[str, Any]]
Used = dict[str, list[int]]


def used(method: Method, out: Generation, n_layers: int) -> Used | None:
    """By layer, where it differs from the layer below: its prompt tokens computed by each new token.

    None where generated tokens are pruned, too: what then is revived is not the prompt's alone.
    """
    if isinstance(method, Pruning) and method.prune_generated:
        return None
    computed = out.passes["computed"].reshape(-1, n_layers).copy()
    computed[1:] -= 1  # a step computes its own token in every layer
    so_far = computed.cumsum(axis=0)
    return {
        str(layer): [int(n) for n in so_far[:, layer]]
        for layer in range(n_layers)
        if layer == 0 or (so_far[:, layer] != so_far[:, layer - 1]).any()
    }


def token_use(rows: Rows) -> dict[int, np.ndarray]:
    """By layer: the mean share of the prompt used at each step; an answer that has ended stays as it is."""
    layers = sorted({int(layer) for row in rows for layer in row["used"]})
    steps = max((row["new_tokens"] for row in rows), default=0)
    return {
        layer: np.mean(
            [extended(series_at(row, layer), steps) / row["prompt_tokens"] for row in rows], axis=0
        )
        for layer in layers
    }


def series_at(row: Mapping[str, Any], layer: int) -> Sequence[int]:
    """A layer that has no series of its own is like the next one below that has."""
    series: Sequence[int] = row["used"][str(max(int(one) for one in row["used"] if int(one) <= layer))]
    return series


def extended(series: Sequence[int], steps: int) -> np.ndarray:
    return np.pad(np.asarray(series, float), (0, steps - len(series)), mode="edge")


def by_pruned_setting(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each setting that ever leaves a token out of a layer, as far as they tell."""
    pruned = dict.fromkeys(row["setting"] for row in rows if row["used"] and len(row["used"]) > 1)
    return {setting: [row for row in rows if row["setting"] == setting] for setting in pruned}


def plot_token_use(rows_by_setting: Mapping[str, Rows], file: Path) -> Path:
    """A panel a setting, a line for the layers from one stage to the next; needs matplotlib."""
    abreast = min(MOST_ABREAST, len(rows_by_setting))
    below = -(-len(rows_by_setting) // abreast)
    figure = new_figure(WIDTH * abreast, HEIGHT * below)
    panels = figure.subplots(below, abreast, sharey=True, squeeze=False)
    for axes, (setting, rows) in zip(panels.flat, rows_by_setting.items(), strict=False):
        draw(axes, token_use(rows))
        axes.set_title("\n".join(wrap(setting, TITLE_WIDTH)), fontsize="small")
    for axes in list(panels.flat)[len(rows_by_setting) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("prompt tokens computed so far, percent")
    figure.savefig(file, dpi=DPI)
    return file


def draw(axes: Axes, shares: Mapping[int, np.ndarray]) -> None:
    from matplotlib.ticker import MaxNLocator

    for layer, above in zip(shares, [*list(shares)[1:], None], strict=True):
        last = "the top" if above is None else above - 1
        told = f"layer {layer}" if last == layer else f"layers {layer} to {last}"
        axes.plot(range(1, len(shares[layer]) + 1), 100 * shares[layer], marker=".", label=told)
    axes.set_xlabel("new tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 103)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
