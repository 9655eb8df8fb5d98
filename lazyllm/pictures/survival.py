"""Survival: the share that a stage keeps of what later layers attend to, by its layer, for several keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lazyllm.pictures.figure import new_figure, save

WIDTH, HEIGHT = 8, 5
LINES = 7  # keeps that are drawn
CHOSEN = "#c03028"


def plot_survival(
    layers: Sequence[int],
    keeps: Sequence[float],
    kept: np.ndarray,
    stages: Sequence[tuple[int, float]],
    title: str,
    file: Path,
) -> Path:
    """`kept` is (layers, keeps), `keeps` fall; `stages` after one of `layers` are marked. Writes `file`."""
    figure = new_figure(WIDTH, HEIGHT)
    axes = figure.subplots()
    shown = np.unique(np.linspace(0, len(keeps) - 1, LINES).round().astype(int))
    for number, place in enumerate(shown):
        grey = str(0.15 + 0.65 * number / len(shown))
        axes.plot(layers, 100 * kept[:, place], color=grey, label=f"keep {keeps[place]:.0%}")
    for layer, keep in stages:
        if layer not in layers:
            continue
        curve = kept[layers.index(layer)]
        share = 100 * float(np.interp(keep, [*keeps[::-1], 1.0], [*curve[::-1], 1.0]))
        axes.plot(layer, share, "o", color=CHOSEN, zorder=3)
        axes.annotate(f"{keep:.0%}", (layer, share), (5, 5), textcoords="offset points", color=CHOSEN)
    axes.plot([], [], "o", color=CHOSEN, label="stages of the preset")
    axes.set(
        xlabel="stage after layer", ylabel="kept of what the answer attends to above, percent", ylim=(0, 103)
    )
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    return save(figure, file)
