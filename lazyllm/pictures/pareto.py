"""Quality of the settings of a sweep against the speedup of the first token, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, isnan, log10, nan
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.pictures.figure import COLOURS, Dot, draw_dot, legend_of_dots, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, LINE_HEIGHT = 8, 5.5, 0.19
LABEL_WIDTH, LABEL_HEIGHT = 16, 11  # of a number beside a dot, in typographic points
FRONT, OTHERS = COLOURS[0], "0.65"


def plot_pareto(
    dots: Sequence[Dot],
    front: Sequence[Dot],
    baseline: str,
    quality: str,
    speedup: str,
    title: str,
    file: Path,
    is_divergence: bool,
) -> Path:
    """Numbers the dots of the front, slowest first, and names them in a legend. Writes `file`.

    `baseline` is the label of the dense setting, `quality` and `speedup` those of the axes. The axis of a
    divergence is logarithmic, includes 0 and points down.
    """
    measured = [dot for dot in dots if not isnan(dot.speedup)]
    figure = new_figure(WIDTH, HEIGHT + LINE_HEIGHT * (len(front) + 1))
    axes = figure.subplots()
    for dot in measured:
        dense = dot.label == baseline
        if dot in front:
            draw_dot(axes, dot, dense, color="black" if dense else FRONT, linewidth=1, zorder=3)
        else:  # without an error bar, which would hide those of the front
            draw_dot(axes, dot._replace(low=nan), dense, color=OTHERS, markersize=4, zorder=2)
    axes.plot([dot.speedup for dot in front], [dot.value for dot in front], color=FRONT, zorder=1)
    for number, dot in enumerate(front, 1):
        axes.plot([], [], " ", label=f"{number}  {dot.label}")
    axes.set(xlabel=speedup, ylabel=quality, title=title)
    if is_divergence and measured:
        smallest = min((end for dot in measured for end in (dot.low, dot.value) if end > 0), default=1.0)
        # linear below a power of ten, where the first tick beside 0 is
        axes.set_yscale("symlog", linthresh=10 ** floor(log10(smallest)), linscale=0.5)
        axes.invert_yaxis()
    axes.grid(alpha=0.3)
    legend_of_dots(figure, bool(front), loc="outside lower left", title="on the front", alignment="left")
    figure.draw_without_rendering()  # sets the size of the axes, in which distances are measured
    number_dots(axes, front)
    return save(figure, file)


def number_dots(axes: Axes, front: Sequence[Dot]) -> None:
    """Numbers right of the dots; those of close neighbours form a column beside the last neighbour."""
    pixels = axes.transData.transform([(dot.speedup, dot.value) for dot in front] or np.empty((0, 2)))
    places = (pixels * 72 / axes.figure.dpi).tolist()  # in typographic points from the lower left corner
    columns: list[float] = []
    for x, _ in reversed(places):
        columns.insert(0, columns[0] if columns and columns[0] - x < LABEL_WIDTH else x)
    last_column = last_y = float("inf")
    for number, (dot, (x, y), column) in enumerate(zip(front, places, columns, strict=True), 1):
        label_y = min(y + 4, last_y - LABEL_HEIGHT) if column == last_column else y + 4
        offset = column - x + 6, label_y - y
        axes.annotate(str(number), dot[1:3], offset, textcoords="offset points", fontsize="small", zorder=4)
        last_column, last_y = column, label_y
