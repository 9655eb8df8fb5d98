"""A needle in a haystack: at each depth of texts of each length, and the picture of where it was found."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.longbench.ruler import ONE_NEEDLE, Encoder, Haystack, Item, generate
from lazyllm.picture import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

DEPTHS = tuple(range(0, 101, 10))

Cell = tuple[float, int]  # depth, length


def grid(
    tokenizer: Encoder,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    count: int = 1,
    seed: int = 0,
    task: str = "niah_single_1",
    prose: str | Path | None = None,
) -> list[Item]:
    """`count` items for each length and each depth, in percent; those of a length differ in depth alone."""
    if task not in ONE_NEEDLE:
        raise ValueError(f"a grid of depths needs one of {', '.join(ONE_NEEDLE)}, not {task!r}")
    for name, values in (("lengths", lengths), ("depths", depths)):
        if not len(values) or len({*values}) < len(values):
            raise ValueError(f"{name} must be different numbers, at least one, not {values!r}")
    text = None if prose is None else Haystack.read(prose)
    return [
        item
        for length in lengths
        for depth in depths
        for item in generate(task, tokenizer, length, count, seed, depth, text)
    ]


# ---- the picture ---------------------------------------------------------------------------------

COLOURS = "RdYlBu"  # its ends differ without colour vision, too
MISSING = "#e4e7eb"
DPI = 150
CELL_WIDTH, CELL_HEIGHT = 0.56, 0.34
MARGIN_WIDTH, MARGIN_HEIGHT, TITLE_LINE_HEIGHT = 0.5, 0.9, 0.17
LEAST_PANEL_WIDTH, LEAST_PANEL_HEIGHT = 3.0, 1.4
COLOUR_BAR_WIDTH = 1.2
CHARACTERS_PER_INCH = 12
SLANTED = 6  # lengths from which on their labels are


@dataclass(frozen=True)
class Panel:
    """The mean scores of one setting, from 0 to 100, by depth and length."""

    setting: str
    cells: Mapping[Cell, float]

    def title(self, width: float) -> list[str]:
        """Lines that fit into so many inches; a layer stays beside its keep."""
        together = self.setting.replace(": ", ":\N{NO-BREAK SPACE}")
        mean = sum(self.cells.values()) / len(self.cells)
        return [*textwrap.wrap(together, int(width * CHARACTERS_PER_INCH)), f"mean {mean:.1f}"]


def heat_map(rows: Iterable[Mapping[str, Any]], file: str | Path) -> Path:
    """Draws the mean score of each depth and length, with one panel for each setting, side by side.

    A row has `length` in tokens, `depth` in percent, `score` from 0 to 1 and, where it matters, `setting`.
    The file's name says its format: .png, .svg or .pdf.
    """
    panels = make_panels(rows)
    lengths = sorted({length for panel in panels for _, length in panel.cells})
    depths = sorted({depth for panel in panels for depth, _ in panel.cells})
    width = max(LEAST_PANEL_WIDTH, MARGIN_WIDTH + CELL_WIDTH * len(lengths))
    titles = [panel.title(width) for panel in panels]
    height = MARGIN_HEIGHT + max(LEAST_PANEL_HEIGHT, CELL_HEIGHT * len(depths))
    height += TITLE_LINE_HEIGHT * max(map(len, titles))
    figure = new_figure(COLOUR_BAR_WIDTH + width * len(panels), height)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel, title in zip(all_axes, panels, titles, strict=True):
        image = draw(axes, panel, lengths, depths)
        axes.set_title("\n".join(title), fontsize=10)
        axes.set_xlabel("length, tokens")
    all_axes[0].set_ylabel("depth of the needle, percent")
    bar = figure.colorbar(image, ax=all_axes, pad=0.015, ticks=range(0, 101, 20))
    bar.set_label("answers found, percent")
    target = Path(file)
    figure.savefig(target, dpi=DPI)
    return target


def make_panels(rows: Iterable[Mapping[str, Any]]) -> list[Panel]:
    """Settings in the order in which they come first."""
    scores: defaultdict[str, defaultdict[Cell, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, row in enumerate(rows):
        check_row(number, row)
        scores[str(row.get("setting", ""))][row["depth"], row["length"]].append(row["score"])
    if not scores:
        raise ValueError("a heat map needs at least one row")
    return [
        Panel(setting, {cell: 100 * sum(found) / len(found) for cell, found in cells.items()})
        for setting, cells in scores.items()
    ]


def check_row(number: int, row: Mapping[str, Any]) -> None:
    for name, high in (("length", float("inf")), ("depth", 100), ("score", 1)):
        value: object = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
            expected = f"a number from 0 to {high}" if name != "length" else "a number of tokens"
            raise ValueError(f"row {number}: {name} is {value!r}; expected {expected}")


def draw(axes: Axes, panel: Panel, lengths: Sequence[int], depths: Sequence[float]) -> AxesImage:
    import numpy as np

    values = np.full((len(depths), len(lengths)), np.nan)
    for (depth, length), score in panel.cells.items():
        values[depths.index(depth), lengths.index(length)] = score
    image = axes.imshow(values, cmap=COLOURS, vmin=0, vmax=100, aspect="auto")
    axes.set_facecolor(MISSING)
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    slant: dict[str, Any] = (
        {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if len(lengths) >= SLANTED else {}
    )
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], **slant)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(0.5, len(lengths) - 1), minor=True)
    axes.set_yticks(np.arange(0.5, len(depths) - 1), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="minor", length=0)
    for row, column in np.argwhere(~np.isnan(values)):
        score = values[row, column]
        red, green, blue, _ = image.cmap(image.norm(score))
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        axes.text(column, row, f"{score:.0f}", ha="center", va="center", color=ink, fontsize=8)
    return image
