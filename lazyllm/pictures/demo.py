"""The picture of `lazyllm demo`: times to first token, and tokens in play at each layer of prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lazyllm.pictures.figure import new_figure, save

COLOURS = ["#b8c0cc", "#0b4a8f"]  # a list: matplotlib 3.8 takes a tuple of two for a colour and its alpha
WIDTH, HEIGHT = 10, 4


@dataclass(frozen=True)
class Bar:
    """One setting: its time to first token in seconds, and the tokens in play at each layer."""

    name: str
    ttft: float
    in_play: Sequence[int]


def plot(bars: Sequence[Bar], file: Path) -> Path:
    """Draws times and tokens; speedups are relative to the first bar. Writes `file`."""
    figure = new_figure(WIDTH, HEIGHT)
    times, tokens = figure.subplots(1, 2, width_ratios=(1, 1.6))
    slowest = bars[0].ttft
    columns = times.bar([bar.name for bar in bars], [bar.ttft for bar in bars], color=COLOURS, width=0.6)
    times.bar_label(columns, [f"{bar.ttft:.2f} s\n{slowest / bar.ttft:.2f} x" for bar in bars], padding=3)
    times.set(ylabel="seconds (median)", title="Time to first token", ylim=(0, 1.25 * slowest))
    for bar, colour in zip(bars, COLOURS, strict=True):
        tokens.stairs(bar.in_play, color=colour, label=bar.name, fill=True)
    tokens.set(
        xlabel="layer", ylabel="prompt tokens in play", title="Prefill, layer by layer", ylim=(0, None)
    )
    tokens.legend(loc="upper right", framealpha=1.0)
    for axes in (times, tokens):
        axes.spines[["top", "right"]].set_visible(False)
    return save(figure, file)
