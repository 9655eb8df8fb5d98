"""Pictures with a panel for each setting or data set: needles found, tokens computed, scores by turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.pictures.figure import panel_grid, save, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHARACTERS_PER_INCH = 12
COLOURS = "RdYlBu"  # its ends can be told apart without colour vision
MISSING = "#e4e7eb"
CELL_WIDTH, CELL_HEIGHT = 0.6, 0.34  # inches
SLANTED = 6  # with this many lengths or more, their labels are slanted

Cells = Mapping[tuple[float, int], float]
"""By depth in percent and length in tokens: a mean score from 0 to 100."""
Shares = Mapping[int, np.ndarray]
"""By first layer of a group of equal layers: (new tokens,) shares of the prompt."""
Lines = Mapping[str, Sequence[float]]
"""By setting: the mean score of each turn, 0 to 100."""


def draw_panels(
    panels: Mapping[str, Any],
    draw: Callable[[Axes, Any], object],
    columns: int,
    width: float,
    height: float,
    y_label: str,
) -> tuple[Figure, list[Axes]]:
    """Panels of width x height inches with a common axis, each with its name as title."""
    figure, all_axes = panel_grid(len(panels), columns, width, height, share_y=True)
    for axes, (name, contents) in zip(all_axes, panels.items(), strict=True):
        draw(axes, contents)
        axes.set_title("\n".join(panel_title(name, width)), fontsize="small")
    for axes in all_axes[::columns]:
        axes.set_ylabel(y_label)
    return figure, all_axes


def panel_title(name: str, width: float) -> list[str]:
    """The name in lines of `width` inches; no line ends between a layer and its keep."""
    unbroken = name.replace(": ", ":\N{NO-BREAK SPACE}").splitlines()
    return [line for part in unbroken for line in wrap(part, int(width * CHARACTERS_PER_INCH))]


def plot_needle_map(panels: Mapping[str, Cells], file: Path) -> Path:
    """The share of needles found by depth and length, and its mean, by setting; places without a score stay
    grey. Writes `file`, a .png, .svg or .pdf."""
    lengths = sorted({length for cells in panels.values() for _, length in cells})
    depths = sorted({depth for cells in panels.values() for depth, _ in cells})

    def draw(axes: Axes, cells: Cells) -> None:
        values = np.array([[cells.get((depth, length), np.nan) for length in lengths] for depth in depths])
        axes.pcolormesh(values, cmap=COLOURS, vmin=0, vmax=100, edgecolors="white", linewidth=1.2)
        axes.set(facecolor=MISSING, xlabel="length, tokens")
        axes.set_xticks(np.arange(0.5, len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(np.arange(0.5, len(depths)), [f"{depth:g}" for depth in depths])
        axes.set_ylim(len(depths), 0)
        axes.tick_params(length=0)
        axes.tick_params("x", rotation=45 if len(lengths) >= SLANTED else 0)
        for row, column in np.argwhere(~np.isnan(values)):
            score = values[row, column]
            ink = "white" if abs(score - 50) > 35 else "black"  # the ends of COLOURS are dark
            axes.text(column + 0.5, row + 0.5, f"{score:.0f}", ha="center", va="center", color=ink, size=8)

    width, height = max(3.0, 0.5 + CELL_WIDTH * len(lengths)), max(2.5, 1.3 + CELL_HEIGHT * len(depths))
    titled = {f"{name}\nmean {np.mean([*cells.values()]):.1f}": cells for name, cells in panels.items()}
    figure, all_axes = draw_panels(titled, draw, len(panels), width, height, "depth of the needle, percent")
    mesh = all_axes[0].collections[0]
    figure.colorbar(mesh, ax=all_axes, pad=0.015, ticks=range(0, 101, 20), label="answers found, percent")
    return save(figure, file)


def plot_token_use(panels: Mapping[str, Shares], file: Path) -> Path:
    """The share of the prompt that each layer has computed, by new token and setting. Writes `file`."""
    from matplotlib.ticker import MaxNLocator

    def draw(axes: Axes, shares: Shares) -> None:
        groups = zip(shares, [*list(shares)[1:], None], strict=True)
        for place, (first, above) in enumerate(groups):
            last = "the top" if above is None else above - 1
            layers = f"layer {first}" if last == first else f"layers {first} to {last}"
            new_tokens = range(1, len(shares[first]) + 1)
            axes.plot(new_tokens, 100 * shares[first], **series(place), markersize=4, label=layers)
        axes.set(xlabel="new tokens", ylim=(0, 103))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)

    figure, _ = draw_panels(panels, draw, 4, 5, 4, "prompt tokens computed so far, percent")
    return save(figure, file)


def plot_turns(panels: Mapping[str, Lines], baseline: str, file: Path) -> Path:
    """Scores by turn of a conversation, by data set; `baseline` is the label of dense. Writes `file`."""
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))

    def draw(axes: Axes, lines: Lines) -> None:
        for label, scores in lines.items():
            look = {"color": "black", "marker": "s"} if label == baseline else series(labels.index(label))
            axes.plot(range(1, len(scores) + 1), scores, **look, markersize=5, label=label)
            axes.set_xticks(range(1, len(scores) + 1))
        axes.set(xlabel="turn", ylim=(-3, 103))
        axes.grid(alpha=0.3)

    figure, all_axes = draw_panels(panels, draw, 2, 4.5, 4, "score")
    shown = {str(line.get_label()): line for axes in all_axes for line in axes.get_lines()}
    figure.legend([*shown.values()], [*shown], loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return save(figure, file)
