"""The headline picture: accuracy against the speedup of the first token."""

from __future__ import annotations

from math import isnan
from pathlib import Path

from lazyllm.longbench.summary import DENSE, Summary
from lazyllm.picture import label, new_figure

WIDTH, HEIGHT, LINE_HEIGHT, DPI = 8, 5, 0.22, 150


def plot(summary: Summary, file: Path, model: str) -> Path:
    figure = new_figure(WIDTH, HEIGHT + LINE_HEIGHT * len(summary.settings))
    axes = figure.subplots()
    for setting in summary.settings:
        speed, mean = summary.speed(setting, "ttft"), summary.mean(setting)
        if speed is None:
            continue
        dense = setting == DENSE
        axes.errorbar(
            speed.of_sums,
            mean.value,
            yerr=None if isnan(mean.low) else [[mean.value - mean.low], [mean.high - mean.value]],
            fmt="s" if dense else "o",
            color="black" if dense else None,
            capsize=3,
            label=label(setting),
        )
        if dense:
            axes.axhline(mean.value, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("speedup of the first token against dense (ratio of sums)")
    axes.set_ylabel("score, mean of the categories (95 % interval)")
    axes.set_title(f"{model}: {len(summary.datasets)} data sets, {len(summary.rows)} results")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", fontsize="small", frameon=False)
    else:
        axes.text(0.5, 0.5, "speedups need a dense run beside", ha="center", transform=axes.transAxes)
    figure.savefig(file, dpi=DPI)
    return file
