"""Report of a run: its tables and pictures, as Markdown, CSV and LaTeX files and as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.evaluation.generated.tasks import AT, task_and_length
from lazyllm.evaluation.intervals import Interval
from lazyllm.evaluation.longbench.datasets import LENGTH_BINS, is_by_length, length_bin
from lazyllm.evaluation.summary import DENSE, Row, Speed, Summary
from lazyllm.support.files import write_whole
from lazyllm.support.tables import BOLD, Table

REPORT = "report.md"
SETTINGS = "settings"
Environments = Mapping[str, Mapping[str, Any]]


def figure(value: float) -> str:
    return "" if value != value else f"{value:.2f}"


def with_interval(value: Interval | None, signed: bool = False) -> str:
    if value is None or value.value != value.value:
        return ""
    sign = "+" if signed else ""
    text = f"{value.value:{sign}.2f}"
    return text if value.low != value.low else f"{text} [{value.low:{sign}.2f}, {value.high:{sign}.2f}]"


def with_deviation(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


def factor(speed: Speed | None) -> str:
    return "" if speed is None else f"{speed.of_sums:.2f} ({speed.median:.2f})"


def scores_table(summary: Summary) -> Table:
    """One row per data set, category and mean; one column per setting."""
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
    if summary.uneven:
        rows.append(["items", *(str(summary.n_items(one)) for one in summary.settings)])
        paired = (str(summary.n_paired(one)) if one != DENSE else "" for one in summary.settings)
        rows.append(["items paired", *paired])
    return Table("Scores", ["data set", *summary.settings], rows)


def speed_table(summary: Summary, environments: Environments) -> Table:
    """Speedups are those of `Summary.speed`; with several environments, `times_table` has the others."""
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
    heads = ["setting", "score", "TTFT speedup", "generation speedup", "computed", "reached the top"]
    heads += ["changed nothing", "failed"]
    state = warmth(summary, environments)
    return Table(f"Speed against dense, {state}, items pooled: ratio of sums (median of ratios)", heads, rows)


def warmth(summary: Summary, environments: Environments) -> str:
    """The state of the machine before the first timed run, as `runner.warm_up` leaves it."""
    counts = dict.fromkeys(environments[name]["warm-up runs"] for name in summary.environments)
    told = (f"warm, after {n} short runs and one of each setting" if n else "cold" for n in counts)
    return " or ".join(told)


def times_table(summary: Summary) -> Table:
    """By environment: the rows timed there, and each setting's speedup over dense on the same items there."""
    rows = [
        [name, setting, str(summary.n_timed(name, setting)), *speedups(summary, setting, name)]
        for name in summary.environments
        for setting in summary.settings
        if len(summary.environments) > 1 and summary.n_timed(name, setting)
    ]
    heads = ["environment", "setting", "rows timed", "TTFT speedup", "generation speedup"]
    return Table("Speed by environment, against dense on the same items there", heads, rows)


def speedups(summary: Summary, setting: str, environment: str) -> list[str]:
    timings = ("ttft", "seconds")
    return [factor(summary.speed(setting, timing, environment=environment)) for timing in timings]


def environments_table(summary: Summary, environments: Environments) -> Table:
    names = list(dict.fromkeys(field for one in summary.environments for field in environments[one]))
    rows = [
        [one, str(summary.n_timed(one)), *(str(environments[one].get(name, "")) for name in names)]
        for one in summary.environments
    ]
    return Table("Where rows were timed", ["environment", "rows timed", *names], rows)


def lengths_table(summary: Summary) -> Table:
    """LongBench-E's table: scores of each of its data sets by the length of the items."""
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
    """RULER's table: the mean of the generated tasks at each length."""
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
                with_deviation([summary.mean_score(one) for one in several]),
                with_deviation(speeds) if len(speeds) > 1 else "",
            ]
        )
    heads = ["setting", "seeds", "score", "TTFT speedup"]
    return Table("Over seeds: mean ± standard deviation", heads, rows)


def run_tables(summary: Summary, manifest: Mapping[str, Any]) -> dict[str, Table]:
    """The tables of a run that have rows, by the name of their files."""
    tables = {
        "scores": scores_table(summary),
        "speed": speed_table(summary, manifest["environments"]),
        "times": times_table(summary),
        "lengths": lengths_table(summary),
        "generated_lengths": generated_lengths_table(summary),
        "seeds": seeds_table(summary),
    }
    return {name: table for name, table in tables.items() if table.rows}


def report_text(heading: str, tables: Mapping[str, Table], failed: Sequence[Row]) -> str:
    """The report for a terminal, without pictures and conditions."""
    parts = [heading, *(f"{table.title}\n\n{table.text()}" for table in tables.values())]
    return "\n\n".join([*parts, *failures(failed)])


def failures(failed: Sequence[Row]) -> list[str]:
    if not failed:
        return []
    lines = [f"- {row['dataset']} {row['item']}, {row['setting']}: {row['error']}" for row in failed]
    return ["Failed items, which are in no score:", "\n".join(lines)]


def told(summary: Summary, manifest: Mapping[str, Any]) -> list[str]:
    """The conditions, without the settings' fields, and how the items were chosen."""
    shown = {name: value for name, value in manifest["conditions"].items() if name != SETTINGS}
    lines = [f"- {name}: {plain(value)}" for name, value in shown.items()]
    lines += [f"- items of a call: {plain(one)}" for one in manifest["selections"]]
    return [*lines, f"- items with results: {plain(summary.items)}"]


def plain(value: object) -> str:
    """A mapping as text: its keys, each with its value."""
    if not isinstance(value, Mapping):
        return str(value)
    return ", ".join(f"{name} {one}" for name, one in value.items()) or "none"


def write_report(
    folder: Path,
    heading: str,
    tables: Mapping[str, Table],
    pictures: Sequence[str],
    summary: Summary,
    manifest: Mapping[str, Any],
) -> Path:
    """Writes report.md, and each table as .csv and .tex under its key in `tables`."""
    parts = [f"# {heading}"]
    for table in tables.values():
        parts += [f"## {table.title}", table.markdown()]
    parts += [f"![]({name})" for name in pictures]
    parts += failures(summary.failed)
    where = environments_table(summary, manifest["environments"])
    parts += [f"## {where.title}", where.markdown(), "## Conditions", "\n".join(told(summary, manifest))]
    for name, table in tables.items():
        write_whole(folder / f"{name}.csv", table.csv())
        write_whole(folder / f"{name}.tex", table.latex())
    write_whole(folder / REPORT, "\n\n".join(parts) + "\n")
    return folder / REPORT
