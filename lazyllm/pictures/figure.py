"""Parts that several pictures share: an empty figure, a grid of panels, the look of a series, saving."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.support.optional import package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
# of Okabe and Ito, without yellow: distinct with every kind of colour vision; in grey by markers and lines
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B4B8A")
MARKERS = "oD^vPX*<>"
LINES = ("-", "--", "-.", ":")


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches, with automatic layout and no window. Raises ImportError without matplotlib."""
    package("matplotlib", "a picture", "plots")
    from matplotlib.figure import Figure

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


def series(place: int) -> dict[str, Any]:
    """Colour, marker and line style of series number `place`, from 0."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": LINES[place % len(LINES)],
    }


def save(figure: Figure, file: Path) -> Path:
    figure.savefig(file, dpi=DPI)
    return file
