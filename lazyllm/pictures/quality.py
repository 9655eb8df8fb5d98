"""Quality of settings against their speedup: all scores of a run, or a Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, isnan, log10
from pathlib import Path
from typing import Any, NamedTuple

from lazyllm.pictures.figure import new_figure, save, series

SCORE_AXIS = "score, mean of the categories (95 % interval)"
KL_AXIS = "KL divergence from dense, nats per token (95 % interval)"
MEASURED_AXIS = "speedup of the first token against dense (measured, ratio of sums)"
COUNTED_AXIS = "counted speedup of prefill"
WIDTH, HEIGHT, LINE_HEIGHT = 8, 5.5, 0.19


class Dot(NamedTuple):
    """One setting in a picture of quality against speedup; `low` and `high` are nan without an interval."""

    label: str
    speedup: float
    value: float
    low: float
    high: float


def plot_scores(
    dots: Sequence[Dot],
    baseline: str,
    file: Path,
    title: str,
    axis_names: tuple[str, str] = (MEASURED_AXIS, SCORE_AXIS),
    front: Sequence[Dot] | None = None,
) -> Path:
    """Draws each dot with its own colour and marker, named in a legend. Writes `file`.

    `baseline` is the label of the dense setting, which gets a horizontal line. A line joins the dots of `front`,
    slowest first; all others are then small, grey and without a name. If quality is a divergence, its axis is
    logarithmic, includes 0 and points down.
    """
    measured = [dot for dot in dots if not isnan(dot.speedup)]
    named = measured if front is None else front
    figure = new_figure(WIDTH, HEIGHT + LINE_HEIGHT * (len(named) + 1))
    axes = figure.subplots()
    axes.set(xlabel=axis_names[0], ylabel=axis_names[1], title=title)
    axes.grid(alpha=0.3)
    for place, dot in enumerate(named):
        look: dict[str, Any] = series(place)
        if dot.label == baseline:
            look = {"color": "black", "marker": "s"}
            axes.axhline(dot.value, color="black", linewidth=0.8, linestyle=":")
        bar = None if isnan(dot.low) else [[dot.value - dot.low], [dot.high - dot.value]]
        axes.errorbar(dot.speedup, dot.value, bar, **{**look, "linestyle": "none"}, capsize=3, label=dot.label)
    # without error bars, which would hide those of the front
    others = [dot for dot in measured if dot not in named]
    axes.plot([dot.speedup for dot in others], [dot.value for dot in others], "o", color="0.65", markersize=4, zorder=1)
    if front:
        axes.plot([dot.speedup for dot in front], [dot.value for dot in front], color="0.4", linewidth=1, zorder=1)
    if measured and axis_names[1] == KL_AXIS:
        smallest = min((end for dot in measured for end in (dot.low, dot.value) if end > 0), default=1.0)
        # linear below a power of ten, where the first tick beside 0 is
        axes.set_yscale("symlog", linthresh=10 ** floor(log10(smallest)), linscale=0.5)
        axes.invert_yaxis()
    if named:
        head = None if front is None else "on the front, slowest first"
        figure.legend(loc="outside lower center", fontsize="small", frameon=False, title=head)
    else:
        figure.text(0.5, 0.5, "a speedup needs results of dense", ha="center")
    return save(figure, file)
