"""Token use: the share of the prompt that each layer has computed, by new token, one panel per setting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.pictures.figure import panel_grid, save, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, COLUMNS, TITLE_WIDTH = 5, 4, 4, 56
Shares = Mapping[int, np.ndarray]
"""By first layer of a group of equal layers: (new tokens,) shares of the prompt."""


def plot_token_use(panels: Mapping[str, Shares], file: Path) -> Path:
    """`panels` is by setting. Writes `file`."""
    figure, all_axes = panel_grid(len(panels), COLUMNS, WIDTH, HEIGHT, share_y=True)
    for axes, (setting, shares) in zip(all_axes, panels.items(), strict=True):
        draw_panel(axes, shares)
        axes.set_title("\n".join(wrap(setting, TITLE_WIDTH)), fontsize="small")
    for axes in all_axes[::COLUMNS]:
        axes.set_ylabel("prompt tokens computed so far, percent")
    return save(figure, file)


def draw_panel(axes: Axes, shares: Shares) -> None:
    from matplotlib.ticker import MaxNLocator

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
