"""Needle map: the share of needles found by depth and prompt length, one panel per setting."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.pictures.figure import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh

COLOURS = "RdYlBu"  # its ends can be told apart without colour vision
MISSING = "#e4e7eb"
CELL_WIDTH, CELL_HEIGHT = 0.56, 0.34  # inches, as all sizes here
MARGIN_WIDTH, MARGIN_HEIGHT, TITLE_LINE_HEIGHT = 0.5, 0.9, 0.17
MIN_PANEL_WIDTH, MIN_PANEL_HEIGHT = 3.0, 1.4
COLOUR_BAR_WIDTH = 1.2
CHARACTERS_PER_INCH = 12
SLANTED = 6  # with this many lengths or more, their labels are slanted

Cells = Mapping[tuple[float, int], float]
"""By depth in percent and length in tokens: a mean score from 0 to 100."""


def plot_needle_map(panels: Mapping[str, Cells], file: Path) -> Path:
    """`panels` is by setting; places without a score stay grey. Writes `file`, a .png, .svg or .pdf."""
    if not panels:
        raise ValueError("a needle map needs at least one score")
    lengths = sorted({length for cells in panels.values() for _, length in cells})
    depths = sorted({depth for cells in panels.values() for depth, _ in cells})
    width = max(MIN_PANEL_WIDTH, MARGIN_WIDTH + CELL_WIDTH * len(lengths))
    titles = [panel_title(setting, cells, width) for setting, cells in panels.items()]
    title_height = TITLE_LINE_HEIGHT * max(map(len, titles))
    height = MARGIN_HEIGHT + max(MIN_PANEL_HEIGHT, CELL_HEIGHT * len(depths)) + title_height
    figure = new_figure(COLOUR_BAR_WIDTH + width * len(panels), height)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, cells, title in zip(all_axes, panels.values(), titles, strict=True):
        mesh = draw_panel(axes, cells, lengths, depths)
        axes.set_title("\n".join(title), fontsize=10)
        axes.set_xlabel("length, tokens")
    all_axes[0].set_ylabel("depth of the needle, percent")
    figure.colorbar(mesh, ax=all_axes, pad=0.015, ticks=range(0, 101, 20), label="answers found, percent")
    return save(figure, file)


def panel_title(setting: str, cells: Cells, width: float) -> list[str]:
    """The setting in lines of `width` inches, no layer parted from its keep; and the mean score."""
    unbroken = setting.replace(": ", ":\N{NO-BREAK SPACE}")
    mean = sum(cells.values()) / len(cells)
    return [*textwrap.wrap(unbroken, int(width * CHARACTERS_PER_INCH)), f"mean {mean:.1f}"]


def draw_panel(axes: Axes, cells: Cells, lengths: Sequence[int], depths: Sequence[float]) -> QuadMesh:
    """Draws one setting, with the score written in each cell."""
    values = np.full((len(depths), len(lengths)), np.nan)
    for (depth, length), score in cells.items():
        values[depths.index(depth), lengths.index(length)] = score
    mesh = axes.pcolormesh(values, cmap=COLOURS, vmin=0, vmax=100, edgecolors="white", linewidth=1.2)
    axes.set_facecolor(MISSING)
    axes.set_yticks(np.arange(0.5, len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xticks(np.arange(0.5, len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_ylim(len(depths), 0)
    if len(lengths) >= SLANTED:
        for text in axes.get_xticklabels():
            text.set(rotation=45, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for row, column in np.argwhere(~np.isnan(values)):
        score = values[row, column]
        red, green, blue, _ = mesh.cmap(mesh.norm(score))
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        axes.text(column + 0.5, row + 0.5, f"{score:.0f}", ha="center", va="center", color=ink, fontsize=8)
    return mesh
