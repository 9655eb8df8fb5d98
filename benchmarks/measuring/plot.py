"""The plot of a report: ops against the ceiling, prefill of each engine, and speedups by pruning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring.place import on_threads
from benchmarks.measuring.report import Row, Section
from benchmarks.measuring.rounds import Times
from lazyllm.pictures.figure import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS_COLOUR = "#0b4a8f"
COLOURS = {
    "lazyllm": OURS_COLOUR,
    "transformers f32": "#c2571a",
    "transformers bf16": "#c2571a",
    "llama.cpp F16": "#3c8d5a",
}
PALE = "#b8c0cc"
SHARE = "of ceiling"


def plot(sections: Sequence[Section], path: Path) -> None:
    """Draws one panel for each suite in DRAWINGS that has rows. ImportError without matplotlib."""
    drawable = [row for suite in DRAWINGS for row in rows_of(sections, suite)]
    threads = max((int(row.keys.get("threads", 0)) for row in drawable), default=0)
    panels = [
        (draw, rows)
        for suite, draw in DRAWINGS.items()
        if (rows := [row for row in rows_of(sections, suite) if row.keys.get("threads", 0) == threads])
    ]
    if not panels:
        return
    figure = new_figure(6 * len(panels), 6)
    for axes, (draw, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, rows)
        axes.spines[["top", "right"]].set_visible(False)
    where = on_threads(threads) if threads else drawable[0].keys.get("device", "")
    figure.suptitle(f"{where}, medians")
    figure.savefig(path, dpi=150)


def rows_of(sections: Sequence[Section], suite: str) -> list[Row]:
    return [row for section in sections if section.suite == suite for row in section.rows]


def number(row: Row, name: str) -> float:
    value: Any = row.figures[name]
    return float(value.median if isinstance(value, Times) else value)


def plot_shares(axes: Axes, rows: list[Row]) -> None:
    rows = [row for row in rows if SHARE in row.figures]
    axes.barh([row.label for row in rows], [number(row, SHARE) for row in rows], color=OURS_COLOUR)
    for row in rows:
        if goal := row.goals.get(SHARE):
            axes.plot(goal.bound, row.label, "|", color=PALE, markersize=12, markeredgewidth=3)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set(xlabel="share of the multiply-add ceiling", title="Ops (grey marks: goals, if judged)")


def plot_times(axes: Axes, rows: list[Row]) -> None:
    for engine, colour in COLOURS.items():
        mine = [row for row in rows if row.keys["engine"] == engine]
        if mine:
            tokens, times = [row.keys["tokens"] for row in mine], [number(row, "time") for row in mine]
            axes.plot(tokens, times, "o-", color=colour, label=engine)
    axes.set(xlabel="prompt tokens", ylabel="seconds", title="Dense prefill", ylim=(0, None))
    axes.set_xticks(sorted({int(row.keys["tokens"]) for row in rows}))
    axes.legend()


def plot_speedups(axes: Axes, rows: list[Row]) -> None:
    rows = [row for row in rows if "counted" in row.figures]
    for tokens in sorted({int(row.keys["tokens"]) for row in rows}):
        mine = [row for row in rows if row.keys["tokens"] == tokens]
        counted, measured = ([number(row, "counted") for row in mine], [number(row, "measured") for row in mine])
        axes.plot(counted, measured, "o", label=f"{tokens} tokens")
    most = max(number(row, name) for row in rows for name in ("counted", "measured"))
    axes.plot([1, most], [1, most], color=PALE, zorder=0, label="measured = counted")
    axes.set(xlabel="speedup by counted work", ylabel="speedup measured", title="Pruned prefill")
    axes.legend()


def plot_formats(axes: Axes, rows: list[Row]) -> None:
    """The time of llama.cpp with the same weights, as a multiple of ours."""
    rows = [row for row in rows if row.keys["engine"] == "llama.cpp"]
    labels = [f"{row.keys['model']}, {row.keys['format']}" for row in rows]
    for place, (name, colour) in enumerate((("prefill / ours", OURS_COLOUR), ("decode / ours", PALE))):
        heights = [row + 0.4 * place - 0.2 for row in range(len(rows))]
        axes.barh(heights, [number(row, name) for row in rows], 0.38, color=colour, label=name)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="time of llama.cpp / ours, same weights", title="Formats of weights")
    axes.legend()


DRAWINGS = {"ops": plot_shares, "prefill": plot_times, "pruned": plot_speedups, "formats": plot_formats}
