"""Score by turn of a conversation about one text, one panel per data set and one line per setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lazyllm.pictures.figure import panel_grid, save, series

WIDTH, HEIGHT, COLUMNS = 4.5, 4, 2
Lines = Mapping[str, Sequence[float]]
"""By setting: the mean score of each turn, 0 to 100."""


def plot_turns(panels: Mapping[str, Lines], baseline: str, file: Path) -> Path:
    """`panels` is by data set; `baseline` is the label of the dense setting. Writes `file`."""
    figure, all_axes = panel_grid(len(panels), COLUMNS, WIDTH, HEIGHT, share_y=True)
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    for axes, (name, lines) in zip(all_axes, panels.items(), strict=True):
        for label, scores in lines.items():
            look = {"color": "black", "marker": "s"} if label == baseline else series(labels.index(label))
            axes.plot(range(1, len(scores) + 1), scores, **look, markersize=5, label=label)
            axes.set_xticks(range(1, len(scores) + 1))
        axes.set(title=name, xlabel="turn", ylim=(-3, 103))
        axes.grid(alpha=0.3)
    for axes in all_axes[::COLUMNS]:
        axes.set_ylabel("score")
    shown = {str(line.get_label()): line for axes in all_axes for line in axes.get_lines()}
    handles = [*shown.values()]
    figure.legend(handles, [*shown], loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return save(figure, file)
