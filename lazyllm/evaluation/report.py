"""Report of a run: its tables and pictures, as Markdown, CSV and LaTeX files and as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.evaluation.generated.tasks import AT, task_and_length
from lazyllm.evaluation.intervals import Interval
from lazyllm.evaluation.longbench.datasets import LENGTH_BINS, is_by_length, length_bin
from lazyllm.evaluation.summary import DENSE_LABEL, Row, Summary, failure
from lazyllm.support.files import write_whole
from lazyllm.support.tables import BOLD, Table

REPORT = "report.md"
SETTINGS = "settings"
TIMINGS = {"ttft": "TTFT speedup", "seconds": "generation speedup"}
Environments = Mapping[str, Mapping[str, Any]]


# ---- cells ---------------------------------------------------------------------------------------


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


def speedups(summary: Summary, setting: str, environment: str | None = None) -> list[str]:
    speeds = (summary.speed(setting, timing, environment=environment) for timing in TIMINGS)
    return [f"{speed.of_sums:.2f} ({speed.median:.2f})" if speed else "" for speed in speeds]


# ---- tables --------------------------------------------------------------------------------------


def scores_table(summary: Summary) -> Table:
    """One row per data set, category and mean; one column per setting."""
    settings, rows = summary.settings, []
    for category, names in summary.categories.items():
        rows += [[name, *(figure(summary.score(label, name)) for label in settings)] for name in names]
        means = (with_interval(summary.mean(label, category)) for label in settings)
        rows.append([f"{BOLD}{category}{BOLD} [95 %]", *means])
    means = (with_interval(summary.mean(label)) for label in settings)
    rows.append([f"{BOLD}mean of the categories{BOLD} [95 %]", *means])
    differences = (None if label == DENSE_LABEL else summary.difference(label) for label in settings)
    rows.append(["paired difference to dense [95 %]", *(with_interval(each, True) for each in differences)])
    if summary.uneven:
        rows.append(["items", *(str(len(summary.of(label))) for label in settings)])
        dense = summary.of(DENSE_LABEL).keys()
        paired = (len(dense & summary.of(label).keys()) for label in settings)
        rows.append(["items paired", *map(str, paired)])
    return Table("Scores", ["data set", *settings], rows)


def speed_table(summary: Summary, environments: Environments) -> Table:
    """Speedups are those of `Summary.speed`; with several environments, `times_table` has the others."""
    rows = [
        [
            setting,
            figure(summary.mean_score(setting)),
            *speedups(summary, setting),
            f"{summary.average(setting, 'computed'):.1%}",
            f"{summary.average(setting, 'reached_top'):.1%}",
            str(summary.count(setting, "changed_nothing")),
            str(sum(row["setting"] == setting for row in summary.failed)),
        ]
        for setting in summary.settings
    ]
    heads = ["setting", "score", *TIMINGS.values()]
    heads += ["computed", "reached the top", "changed nothing", "failed"]
    state = warmth(summary, environments)
    return Table(f"Speed against dense, {state}, items pooled: ratio of sums (median of ratios)", heads, rows)


def warmth(summary: Summary, environments: Environments) -> str:
    """The state of the machine before the first timed run, as `trial.warm_up` leaves it."""
    counts = dict.fromkeys(environments[name]["warm-up runs"] for name in summary.environments)
    return " or ".join(f"warm, after {n} short runs and one of each setting" if n else "cold" for n in counts)


def times_table(summary: Summary) -> Table:
    """By environment: the rows timed there, and each setting's speedup over dense on the same items there."""
    rows = [
        [name, setting, str(n_timed), *speedups(summary, setting, name)]
        for name in summary.environments
        for setting in summary.settings
        if len(summary.environments) > 1 and (n_timed := summary.n_timed(name, setting))
    ]
    heads = ["environment", "setting", "rows timed", *TIMINGS.values()]
    return Table("Speed by environment, against dense on the same items there", heads, rows)


def environments_table(summary: Summary, environments: Environments) -> Table:
    fields = list(dict.fromkeys(field for name in summary.environments for field in environments[name]))
    rows = [
        [name, str(summary.n_timed(name)), *(str(environments[name].get(field, "")) for field in fields)]
        for name in summary.environments
    ]
    return Table("Where rows were timed", ["environment", "rows timed", *fields], rows)


def lengths_table(summary: Summary) -> Table:
    """LongBench-E's table: scores of each of its data sets by the length of the items."""
    rows = []
    for name in filter(is_by_length, summary.datasets):
        of_settings = [summary.of(label, [name]).values() for label in summary.settings]
        for part in LENGTH_BINS:
            scores = [
                [row["score"] for row in items if length_bin(row["length"]) == part] for items in of_settings
            ]
            if any(scores):
                means = (100 * float(np.mean(values)) if values else nan for values in scores)
                rows.append([f"{name}, {part}", *map(figure, means)])
    return Table("LongBench-E by length, in words", ["data set", *summary.settings], rows)


def generated_lengths_table(summary: Summary) -> Table:
    """RULER's table: the mean of the generated tasks at each length."""
    by_length: dict[int, list[str]] = {}
    for name in summary.datasets:
        if AT in name:
            by_length.setdefault(task_and_length(name)[1], []).append(name)
    rows = []
    for length, names in by_length.items():
        means = (np.mean([summary.score(label, name) for name in names]) for label in summary.settings)
        rows.append([f"{length} tokens, {len(names)} tasks", *(figure(float(mean)) for mean in means)])
    return Table("Generated tasks, mean by length", ["length", *summary.settings], rows)


def run_tables(summary: Summary, manifest: Mapping[str, Any]) -> dict[str, Table]:
    """The tables of a run that have rows, by the name of their files."""
    tables = {
        "scores": scores_table(summary),
        "speed": speed_table(summary, manifest["environments"]),
        "times": times_table(summary),
        "lengths": lengths_table(summary),
        "generated_lengths": generated_lengths_table(summary),
    }
    return {name: table for name, table in tables.items() if table.rows}


# ---- the report ----------------------------------------------------------------------------------


def report_text(heading: str, tables: Mapping[str, Table], failed: Sequence[Row]) -> str:
    """The report for a terminal, without pictures and conditions."""
    parts = [heading, *(f"{table.title}\n\n{table.text()}" for table in tables.values())]
    return "\n\n".join([*parts, *failures(failed)])


def failures(failed: Sequence[Row]) -> list[str]:
    if not failed:
        return []
    return ["Failed items, which are in no score:", "\n".join(f"- {failure(row)}" for row in failed)]


def conditions(summary: Summary, manifest: Mapping[str, Any]) -> str:
    """The conditions, without the settings' fields, and how the items were chosen."""
    lines = [
        f"- {name}: {plain(value)}" for name, value in manifest["conditions"].items() if name != SETTINGS
    ]
    lines += [f"- items of a call: {plain(selection)}" for selection in manifest["selections"]]
    return "\n".join([*lines, f"- items with results: {plain(summary.items)}"])


def plain(value: object) -> str:
    """A mapping as text: its keys, each with its value."""
    if not isinstance(value, Mapping):
        return str(value)
    return ", ".join(f"{name} {inner}" for name, inner in value.items()) or "none"


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
    parts += [f"## {where.title}", where.markdown(), "## Conditions", conditions(summary, manifest)]
    for name, table in tables.items():
        write_whole(folder / f"{name}.csv", table.csv())
        write_whole(folder / f"{name}.tex", table.latex())
    write_whole(folder / REPORT, "\n\n".join(parts) + "\n")
    return folder / REPORT
