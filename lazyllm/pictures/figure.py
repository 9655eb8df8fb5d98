"""Parts that several pictures share: an empty figure, a grid of panels, a point with its error bar."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
LABEL_WIDTH = 100


class Dot(NamedTuple):
    """One setting in a picture of quality against speedup; `low` and `high` are nan without an interval.

    Dots with the same `label` get one colour and one legend entry.
    """

    label: str
    speedup: float
    value: float
    low: float
    high: float


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches, with automatic layout and no window. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'lazyllm-engine[plots]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def panel_grid(
    count: int, columns: int, width: float, height: float, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """`count` panels of width x height inches, row by row; places left over in the last row stay empty."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = new_figure(width * columns, height * rows)
    panels = list(figure.subplots(rows, columns, sharey=share_y, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def draw_dot(axes: Axes, dot: Dot, baseline: bool, **style: object) -> None:
    """A point with its error bar: a square for the baseline, a circle for any other setting."""
    bar = None if isnan(dot.low) else [[dot.value - dot.low], [dot.high - dot.value]]
    axes.errorbar(dot.speedup, dot.value, bar, fmt="s" if baseline else "o", capsize=3, **style)  # type: ignore[arg-type]


def label(text: str) -> str:
    """The text, shortened to the width of a legend."""
    return text if len(text) <= LABEL_WIDTH else f"{text[: LABEL_WIDTH - 1]}…"
