"""Reports of a run: tables as Markdown, CSV and LaTeX, and the pictures that belong to them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.longbench.datasets import LENGTH_BINS, is_by_length, length_bin
from lazyllm.longbench.generated import AT, task_and_length
from lazyllm.longbench.results import write_whole
from lazyllm.longbench.summary import DENSE, Interval, Row, Speed, Spread, Summary

REPORT, SCORES, SPEEDS, SEEDS = "report.md", "scores", "speed", "seeds"
LENGTHS, GENERATED_LENGTHS = "lengths", "generated_lengths"
LATEX_SPECIAL = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)
BOLD = "**"
UNTOLD = ("format", "methods")


@dataclass(frozen=True)
class Table:
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )

    def csv(self) -> str:
        text = io.StringIO()
        rows = [[cell.replace(BOLD, "") for cell in row] for row in self.rows]
        csv.writer(text, lineterminator="\n").writerows([self.heads, *rows])
        return text.getvalue()

    def latex(self) -> str:
        lines = [
            " & ".join(cell.replace(BOLD, "").translate(LATEX_SPECIAL) for cell in line) + r" \\"
            for line in (self.heads, *self.rows)
        ]
        columns = "l" + "r" * (len(self.heads) - 1)
        return "\n".join(
            [
                rf"\begin{{tabular}}{{{columns}}}",
                r"\hline",
                lines[0],
                r"\hline",
                *lines[1:],
                r"\hline",
                r"\end{tabular}",
                "",
            ]
        )


def figure(value: float) -> str:
    return "" if value != value else f"{value:.2f}"


def with_interval(value: Interval | None, signed: bool = False) -> str:
    if value is None or value.value != value.value:
        return ""
    sign = "+" if signed else ""
    text = f"{value.value:{sign}.2f}"
    return text if value.low != value.low else f"{text} [{value.low:{sign}.2f}, {value.high:{sign}.2f}]"


def with_deviation(spread: Spread) -> str:
    return f"{spread.mean:.2f} ± {spread.deviation:.2f}"


def factor(speed: Speed | None) -> str:
    return "" if speed is None else f"{speed.of_sums:.2f} ({speed.median:.2f})"


def scores_table(summary: Summary) -> Table:
    """Data sets by category, categories, mean; one column a setting."""
    rows = []
    for category, names in summary.categories.items():
        rows += [
            [name, *(figure(summary.score(setting, name)) for setting in summary.settings)] for name in names
        ]
        means = (with_interval(summary.mean(one, category)) for one in summary.settings)
        rows.append([f"{BOLD}{category}{BOLD} [95 %]", *means])
    means = (with_interval(summary.mean(one)) for one in summary.settings)
    rows.append([f"{BOLD}mean of the categories{BOLD} [95 %]", *means])
    differences = [
        with_interval(summary.difference(one), signed=True) if one != DENSE else ""
        for one in summary.settings
    ]
    rows.append(["paired difference to dense [95 %]", *differences])
    if summary.failed:
        paired = (str(summary.n_paired(one)) if one != DENSE else "" for one in summary.settings)
        rows.append(["items that it pairs", *paired])
    return Table("Scores", ["data set", *summary.settings], rows)


def speed_table(summary: Summary, warm_ups: int) -> Table:
    rows = [
        [
            setting,
            figure(summary.mean_score(setting)),
            factor(summary.speed(setting, "ttft")),
            factor(summary.speed(setting, "seconds")),
            f"{summary.average(setting, 'computed'):.1%}",
            f"{summary.average(setting, 'reached_top'):.1%}",
            str(summary.count(setting, "changed_nothing")),
            str(sum(row["setting"] == setting for row in summary.failed)),
        ]
        for setting in summary.settings
    ]
    heads = [
        "setting",
        "score",
        "TTFT speedup",
        "generation speedup",
        "computed",
        "reached the top",
        "changed nothing",
        "failed",
    ]
    state = f"warm, after {warm_ups} runs" if warm_ups else "cold"
    return Table(f"Speed against dense, {state}: ratio of sums (median of ratios)", heads, rows)


def lengths_table(summary: Summary) -> Table:
    """LongBench-E's way to look: each of its data sets by the length of the items."""
    rows = []
    for name in filter(is_by_length, summary.datasets):
        parts = {
            one: summary.score_within(one, name, lambda row: length_bin(row["length"]))
            for one in summary.settings
        }
        for part in LENGTH_BINS:
            if any(part in scores for scores in parts.values()):
                cells = [figure(parts[one].get(part, float("nan"))) for one in summary.settings]
                rows.append([f"{name}, {part}", *cells])
    return Table("LongBench-E by length, in words", ["data set", *summary.settings], rows)


def generated_lengths_table(summary: Summary) -> Table:
    """RULER's way to look: the mean of the generated tasks at each length."""
    by_length: dict[int, list[str]] = {}
    for name in summary.datasets:
        if AT in name:
            by_length.setdefault(task_and_length(name)[1], []).append(name)
    rows = [
        [
            f"{length} tokens, {len(names)} tasks",
            *(
                figure(float(np.mean([summary.score(one, name) for name in names])))
                for one in summary.settings
            ),
        ]
        for length, names in by_length.items()
    ]
    return Table("Generated tasks, mean by length", ["length", *summary.settings], rows)


def seeds_table(summary: Summary) -> Table:
    rows = []
    for common, several in summary.seeded.items():
        speeds = [speed.of_sums for one in several if (speed := summary.speed(one, "ttft"))]
        rows.append(
            [
                common,
                str(len(several)),
                with_deviation(Spread.of([summary.mean_score(one) for one in several])),
                with_deviation(Spread.of(speeds)) if len(speeds) > 1 else "",
            ]
        )
    heads = ["setting", "seeds", "score", "TTFT speedup"]
    return Table("Over seeds: mean ± standard deviation", heads, rows)


def report(folder: Path, summary: Summary, manifest: Mapping[str, Any], pictures: Sequence[str]) -> None:
    """Writes report.md and each table as .csv and .tex."""
    tables = {
        SCORES: scores_table(summary),
        SPEEDS: speed_table(summary, manifest["warm-up runs"]),
        LENGTHS: lengths_table(summary),
        GENERATED_LENGTHS: generated_lengths_table(summary),
        SEEDS: seeds_table(summary),
    }
    tables = {name: table for name, table in tables.items() if table.rows}
    heading = f"{manifest['model']}: {len(summary.rows)} results"
    write_report(folder, heading, tables, pictures, summary.failed, manifest)


def write_report(
    folder: Path,
    heading: str,
    tables: Mapping[str, Table],
    pictures: Sequence[str],
    failed: Sequence[Row],
    manifest: Mapping[str, Any],
) -> None:
    """`tables` by the name of their files."""
    parts = [f"# {heading}"]
    for table in tables.values():
        parts += [f"## {table.title}", table.markdown()]
    parts += [f"![]({name})" for name in pictures]
    if failed:
        lines = [f"- {row['dataset']} {row['item']}, {row['setting']}: {row['error']}" for row in failed]
        parts += ["## Failed items, which count in no score", "\n".join(lines)]
    told = [f"- {name}: {value}" for name, value in manifest.items() if name not in UNTOLD]
    parts += ["## Conditions", "\n".join(told)]
    write_whole(folder / REPORT, "\n\n".join(parts) + "\n")
    for name, table in tables.items():
        write_whole(folder / f"{name}.csv", table.csv())
        write_whole(folder / f"{name}.tex", table.latex())
