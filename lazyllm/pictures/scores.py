"""Score against the speedup of the first token, one point per setting."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path

from lazyllm.pictures.figure import Dot, draw_dot, legend_of_dots, new_figure, save, series

WIDTH, HEIGHT, LINE_HEIGHT = 8, 5, 0.22


def plot_scores(dots: Sequence[Dot], baseline: str, file: Path, title: str) -> Path:
    """`baseline` is the label of the dense setting, which gets a horizontal line. Writes `file`."""
    by_label: dict[str, list[Dot]] = {}
    for dot in dots:
        if not isnan(dot.speedup):
            by_label.setdefault(dot.label, []).append(dot)
    figure = new_figure(WIDTH, HEIGHT + LINE_HEIGHT * len(by_label))
    axes = figure.subplots()
    for place, (name, same_label) in enumerate(by_label.items()):
        dense = name == baseline
        for number, dot in enumerate(same_label):
            look = {"color": "black"} if dense else series(place)
            draw_dot(axes, dot, dense, **look, label=None if number else name)
            if dense:
                axes.axhline(dot.value, color="black", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="speedup of the first token against dense (ratio of sums)",
        ylabel="score, mean of the categories (95 % interval)",
        title=title,
    )
    axes.grid(alpha=0.3)
    legend_of_dots(figure, bool(by_label), loc="outside lower center")
    return save(figure, file)
