"""Quality of settings against their speedup: all scores of a run, or a Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, isnan, log10, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lazyllm.pictures.figure import COLOURS, new_figure, save, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

SCORE_AXIS = "score, mean of the categories (95 % interval)"
KL_AXIS = "KL divergence from dense, nats per token (95 % interval)"
MEASURED_AXIS = "speedup of the first token against dense (measured, ratio of sums)"
COUNTED_AXIS = "counted speedup of prefill"
WIDTH, HEIGHT, LINE_HEIGHT = 8, 5.5, 0.19
FRONT, OTHERS = COLOURS[0], "0.65"


class Dot(NamedTuple):
    """One setting in a picture of quality against speedup; `low` and `high` are nan without an interval."""

    label: str
    speedup: float
    value: float
    low: float
    high: float


def plot_scores(dots: Sequence[Dot], baseline: str, file: Path, title: str) -> Path:
    """`baseline` is the label of the dense setting, which gets a horizontal line. Writes `file`."""
    measured = [dot for dot in dots if not isnan(dot.speedup)]
    figure, axes = axes_of(len(measured), MEASURED_AXIS, SCORE_AXIS, title)
    for place, dot in enumerate(measured):
        dense = dot.label == baseline
        draw_dot(axes, dot, dense, **({"color": "black"} if dense else series(place)), label=dot.label)
        if dense:
            axes.axhline(dot.value, color="black", linewidth=0.8, linestyle=":")
    legend_of_dots(figure, bool(measured), loc="outside lower center")
    return save(figure, file)


def plot_pareto(
    dots: Sequence[Dot], front: Sequence[Dot], baseline: str, axis_names: tuple[str, str], title: str, file: Path
) -> Path:
    """Numbers the dots of the front, slowest first, and names them in a legend. Writes `file`.

    `baseline` is the label of the dense setting. The axis of quality, the second one, is logarithmic,
    includes 0 and points down if it is of a divergence.
    """
    measured = [dot for dot in dots if not isnan(dot.speedup)]
    figure, axes = axes_of(len(front) + 1, *axis_names, title)
    for dot in measured:
        dense = dot.label == baseline
        if dot in front:
            draw_dot(axes, dot, dense, color="black" if dense else FRONT, linewidth=1, zorder=3)
        else:  # without an error bar, which would hide those of the front
            draw_dot(axes, dot._replace(low=nan), dense, color=OTHERS, markersize=4, zorder=2)
    axes.plot([dot.speedup for dot in front], [dot.value for dot in front], color=FRONT, zorder=1)
    for number, dot in enumerate(front, 1):
        axes.plot([], [], " ", label=f"{number}  {dot.label}")
    if measured and axis_names[1] == KL_AXIS:
        smallest = min((end for dot in measured for end in (dot.low, dot.value) if end > 0), default=1.0)
        # linear below a power of ten, where the first tick beside 0 is
        axes.set_yscale("symlog", linthresh=10 ** floor(log10(smallest)), linscale=0.5)
        axes.invert_yaxis()
    legend_of_dots(figure, bool(front), loc="outside lower left", title="on the front", alignment="left")
    figure.draw_without_rendering()  # sets the size of the axes, in which distances are measured
    number_dots(axes, front)
    return save(figure, file)


def axes_of(legend_lines: int, x_label: str, y_label: str, title: str) -> tuple[Figure, Axes]:
    figure = new_figure(WIDTH, HEIGHT + LINE_HEIGHT * legend_lines)
    axes = figure.subplots()
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.grid(alpha=0.3)
    return figure, axes


def number_dots(axes: Axes, front: Sequence[Dot]) -> None:
    """Numbers right of the dots, each below those that it would touch."""
    boxes: list[Bbox] = []
    for number, dot in enumerate(front, 1):
        look: dict[str, Any] = {"textcoords": "offset points", "fontsize": "small", "zorder": 4}
        label = axes.annotate(str(number), dot[1:3], (6, 4), **look)
        while any(map(label.get_window_extent().overlaps, boxes)):
            label.xyann = label.xyann[0], label.xyann[1] - 1
        boxes.append(label.get_window_extent())


def draw_dot(axes: Axes, dot: Dot, baseline: bool, **style: Any) -> None:
    """A point with its error bar; without a style, a square for the baseline and a circle for others."""
    bar = None if isnan(dot.low) else [[dot.value - dot.low], [dot.high - dot.value]]
    look: dict[str, Any] = {"marker": "s" if baseline else "o", "capsize": 3, **style, "linestyle": "none"}
    axes.errorbar(dot.speedup, dot.value, bar, **look)


def legend_of_dots(figure: Figure, has_dots: bool, **options: Any) -> None:
    """A legend outside the axes, or in place of it a note why there are no dots."""
    if has_dots:
        figure.legend(fontsize="small", frameon=False, **options)
    else:
        figure.text(0.5, 0.5, "a speedup needs results of dense", ha="center")
