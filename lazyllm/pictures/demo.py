"""The picture of `lazyllm demo`: times to first token, and tokens in play at each layer of prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lazyllm.pictures.figure import new_figure, save

COLOURS = ["#b8c0cc", "#0b4a8f"]  # a list: matplotlib 3.8 takes a tuple of two for a colour and its alpha


def plot(ttfts: Mapping[str, float], in_play: Mapping[str, Sequence[int]], file: Path) -> Path:
    """Draws by setting the time to first token in seconds, with the speedup over the first setting, and the
    tokens in play at each layer. Writes `file`."""
    figure = new_figure(10, 4)
    times, tokens = figure.subplots(1, 2, width_ratios=(1, 1.6))
    slowest = next(iter(ttfts.values()))
    columns = times.bar([*ttfts], [*ttfts.values()], color=COLOURS, width=0.6)
    times.bar_label(columns, [f"{ttft:.2f} s\n{slowest / ttft:.2f} x" for ttft in ttfts.values()], padding=3)
    times.set(ylabel="seconds (median)", title="Time to first token", ylim=(0, 1.25 * slowest))
    for (name, counts), colour in zip(in_play.items(), COLOURS, strict=True):
        tokens.stairs(counts, color=colour, label=name, fill=True)
    tokens.set(xlabel="layer", ylabel="prompt tokens in play", title="Prefill, layer by layer")
    tokens.set_ylim(bottom=0)
    tokens.legend(loc="upper right", framealpha=1.0)
    for axes in (times, tokens):
        axes.spines[["top", "right"]].set_visible(False)
    return save(figure, file)
