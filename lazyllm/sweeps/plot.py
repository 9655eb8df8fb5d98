"""The picture of a sweep: quality against the speedup of the first token, the Pareto front as a line."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path

from lazyllm.longbench.summary import DENSE, Interval
from lazyllm.picture import label, new_figure
from lazyllm.sweeps.point import Point, front

WIDTH, HEIGHT, LINE_HEIGHT, DPI = 8, 5.5, 0.19, 150


def plot(points: Sequence[Point], file: Path, title: str) -> Path:
    """Settings on the front are numbered along it and named below."""
    measured = [one for one in points if not isnan(one.speedup)]
    best = front(measured)
    figure = new_figure(WIDTH, HEIGHT + LINE_HEIGHT * (len(best) + 1))
    axes = figure.subplots()
    for one in measured:
        value, below, above = with_bars(quality_of(one))
        axes.errorbar(
            one.speedup,
            value,
            yerr=[[below], [above]],
            fmt="s" if one.setting == DENSE else "o",
            color="black" if one.setting == DENSE else "C0" if one in best else "0.65",
            capsize=3,
            linewidth=1,
            zorder=3 if one in best else 2,
        )
    axes.plot([one.speedup for one in best], [quality_of(one).value for one in best], color="C0", zorder=1)
    for number, one in enumerate(best, 1):
        axes.annotate(
            str(number), (one.speedup, quality_of(one).value), (5, 5), textcoords="offset points", zorder=4
        )
        axes.plot([], [], " ", label=f"{number}  {label(one.setting)}")
    axes.set_xlabel("speedup of the first token against dense (measured, ratio of sums)")
    axes.set_ylabel(told_quality(measured))
    if measured and not measured[0].scored:
        axes.set_yscale("symlog", linthresh=least_above_zero(measured), linscale=0.3, subs=(2, 5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.invert_yaxis()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    if best:
        figure.legend(
            loc="outside lower left", fontsize="small", title="on the front", frameon=False, alignment="left"
        )
    else:
        axes.text(0.5, 0.5, "speedups need results of dense", ha="center", transform=axes.transAxes)
    figure.savefig(file, dpi=DPI)
    return file


def quality_of(one: Point) -> Interval:
    return one.score if one.scored else one.kl


def with_bars(quality: Interval) -> tuple[float, float, float]:
    """The value, and how far its interval reaches below and above it; no bars around a single item."""
    if isnan(quality.low):
        return quality.value, 0.0, 0.0
    return quality.value, quality.value - quality.low, quality.high - quality.value


def least_above_zero(points: Sequence[Point]) -> float:
    """The axis is logarithmic down to here; dense, which lies at 0, stands a little above."""
    ends = [end for one in points for end in (one.kl.low, one.kl.value) if end > 0]
    return min(ends, default=1.0)


def told_quality(points: Sequence[Point]) -> str:
    if points and points[0].scored:
        return "score, mean of the categories (95 % interval)"
    return "KL divergence from dense, nats a token (95 % interval)"
