"""Results of a run: tables and pictures, as Markdown and CSV files and as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.evaluation.generated.tasks import AT, NIAH, kind_of, needles_found, task_and_length
from lazyllm.evaluation.longbench.datasets import DATA_SETS
from lazyllm.evaluation.results import SCORE, read_manifest, read_rows
from lazyllm.evaluation.summary import (
    DENSE_LABEL,
    Interval,
    Row,
    Summary,
    failure,
    interval,
    mean,
    token_use_by_setting,
)
from lazyllm.pictures.panels import plot_needle_map, plot_token_use, plot_turns
from lazyllm.pictures.quality import Dot, plot_scores
from lazyllm.support.files import user_path, write_whole
from lazyllm.support.optional import package
from lazyllm.support.tables import Table, with_bounds

if TYPE_CHECKING:
    import pandas

REPORT = "report.md"
PICTURE, NEEDLE_MAP, TOKEN_USE, TURNS = "scores.png", "heat_map.png", "token_use.png", "turns.png"
LENGTH_BINS = (("0-4k", 0, 4000), ("4-8k", 4000, 8000), ("8k+", 8000, inf))
TIMINGS = {"ttft": "TTFT speedup", "seconds": "generation speedup"}
TURN_FIELDS = ("score", "depth", "ttft", "revived", "computed")
Environments = Mapping[str, Mapping[str, Any]]


def cell(value: float | Interval, form: str = ".2f") -> str:
    """A number, or a value with its interval; empty for NaN."""
    return with_bounds(value if isinstance(value, Interval) else [value], form)


# ---- tables --------------------------------------------------------------------------------------


def scores_table(summary: Summary) -> Table:
    """One row per data set, category and mean; one column per setting."""
    settings, rows = summary.settings, []
    for category, names in [*summary.categories.items(), (None, [])]:
        rows += [[name, *(cell(summary.score(label, name)) for label in settings)] for name in names]
        means = (cell(summary.mean(label, category)) for label in settings)
        rows.append([f"{category or 'mean of the categories'} [95 %]", *means])
    differences = (nan if label == DENSE_LABEL else summary.difference(label) for label in settings)
    rows.append(["paired difference to dense [95 %]", *(cell(difference, "+.2f") for difference in differences)])
    dense, items = summary.of(DENSE_LABEL).keys(), [summary.of(label).keys() for label in settings]
    if any(keys != items[0] for keys in items):
        rows.append(["items", *(str(len(keys)) for keys in items)])
        rows.append(["items paired", *(str(len(dense & keys)) for keys in items)])
    return Table("Scores", ["data set", *settings], rows)


def speed_table(summary: Summary, environments: Environments) -> Table:
    rows = [
        [
            setting,
            cell(summary.mean(setting).value),
            *(str(summary.speed(setting, timing)) for timing in TIMINGS),
            *(f"{mean(summary.values(setting, field)):.1%}" for field in ("computed", "reached_top")),
            f"{summary.values(setting, 'changed_nothing').sum():.0f}",
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


def environments_table(summary: Summary, environments: Environments) -> Table:
    fields = list(dict.fromkeys(field for name in summary.environments for field in environments[name]))
    rows = [
        [name, str(summary.n_timed(name)), *(str(environments[name].get(field, "")) for field in fields)]
        for name in summary.environments
    ]
    return Table("Where rows were timed", ["environment", "rows timed", *fields], rows)


def lengths_table(summary: Summary) -> Table:
    """Scores of each data set of LongBench-E by the words of its items; of RULER, the mean of the tasks."""
    groups: dict[str, list[tuple[str, float, float]]] = {}
    for name in summary.datasets:
        if AT in name:
            groups.setdefault(f"{task_and_length(name)[1]} tokens", []).append((name, 0, inf))
        elif name.endswith("_e"):
            groups |= {f"{name}, {words} words": [(name, low, high)] for words, low, high in LENGTH_BINS}

    def score(setting: str, parts: Sequence[tuple[str, float, float]]) -> str:
        samples = (
            [row["score"] for row in summary.of(setting, [name]).values() if low <= row["length"] < high]
            for name, low, high in parts
        )
        return cell(100 * mean([mean(sample) for sample in samples]))

    rows = [[head, *(score(label, parts) for label in summary.settings)] for head, parts in groups.items()]
    return Table("Scores by length", ["length", *summary.settings], [row for row in rows if any(row[1:])])


def turns_of(summary: Summary) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """By data set with turns and setting: (items, turns) values of each field; scores from 0 to 100."""
    found = {}
    for name in summary.datasets:
        for setting in summary.settings:
            if items := [row["turns"] for row in summary.of(setting, [name]).values() if "turns" in row]:
                found[name, setting] = {
                    field: np.array([[turn[field] for turn in turns] for turns in items], float)
                    for field in TURN_FIELDS
                }
                found[name, setting]["score"] *= 100
    return found


def turns_table(summary: Summary) -> Table:
    """By data set and setting: the score of each turn and by depth; cost of the first and the later turns."""
    rows, n_turns = [], 0
    for (name, setting), turns in turns_of(summary).items():
        score, depth, ttft = turns["score"], turns["depth"], turns["ttft"]
        thirds = (score[(low <= depth) & (depth < low + 34)] for low in (0, 34, 67))
        n_turns = score.shape[1]
        cells = [interval([[score.mean(axis=1)]], 0, 100), *score.mean(axis=0), *map(mean, thirds)]
        cells += [float(values.mean()) for values in (ttft[:, 0], ttft[:, 1:], turns["revived"][:, 1:])]
        rows.append([name, setting, *map(cell, cells), f"{turns['computed'][:, -1].mean():.1%}"])
    heads = ["data set", "setting", "all turns [95 %]", *(f"turn {turn}" for turn in range(1, n_turns + 1))]
    heads += ["first third of the text", "second", "last", "first token, s: turn 1", "later turns"]
    return Table("Turns", [*heads, "revived a later turn", "computed at the end"], rows)


# ---- results -------------------------------------------------------------------------------------


def category_of(name: str) -> str:
    """The category of a LongBench data set or of a generated task; any other name is its own category."""
    if AT in name:
        return kind_of(name).category
    return DATA_SETS[name].category if name in DATA_SETS else name


class Results:
    """The rows and the manifest of a run or sweep; `folder` is None for a sweep without `out`."""

    def __init__(self, rows: Sequence[Row], manifest: Mapping[str, Any], folder: Path | None) -> None:
        self.rows, self.manifest, self.folder = rows, manifest, folder
        self.summary = Summary(rows, category_of)

    @property
    def heading(self) -> str:
        return f"{self.manifest['model']}: {len(self.summary.rows)} results"

    @property
    def tables(self) -> dict[str, Table]:
        """The tables of the report, by the name of their files."""
        return {
            "scores": scores_table(self.summary),
            "speed": speed_table(self.summary, self.manifest["environments"]),
            "lengths": lengths_table(self.summary),
            "turns": turns_table(self.summary),
        }

    def draw(self) -> list[Path]:
        """Draws the pictures of the report."""
        raise NotImplementedError

    def text(self) -> str:
        """The tables of the report, aligned for a terminal."""
        tables = [f"{table.title}\n\n{table.text()}" for table in self.tables.values() if table.rows]
        return "\n\n".join([self.heading, *tables, *self._failures])

    def report(self) -> Path:
        """Writes report.md, each table as .csv and, with matplotlib, the pictures, to the folder."""
        if self.folder is None:
            raise ValueError("a report goes to the sweep's folder; give the sweep one with out=")
        parts = [f"# {self.heading}"]
        for name, table in self.tables.items():
            if table.rows:
                parts += [f"## {table.title}", table.markdown()]
                write_whole(self.folder / f"{name}.csv", table.csv())
        try:
            parts += [f"![]({picture.name})" for picture in self.draw()]
        except ImportError as error:
            parts.append(f"No pictures: {error}")
        where = environments_table(self.summary, self.manifest["environments"])
        parts += [*self._failures, f"## {where.title}", where.markdown(), "## Conditions", self._conditions]
        write_whole(self.folder / REPORT, "\n\n".join(parts) + "\n")
        return self.folder / REPORT

    @property
    def _failures(self) -> list[str]:
        failed = [f"- {failure(row)}" for row in self.summary.failed]
        return ["Failed items, which are in no score:", "\n".join(failed)] if failed else []

    @property
    def _conditions(self) -> str:
        """The conditions, without the settings' fields, and how the items were chosen."""
        facts = [item for item in self.manifest["conditions"].items() if item[0] != "settings"]
        facts += [("items of a call", selection) for selection in self.manifest["selections"]]
        facts += [("items with results", self.summary.items)]
        return "\n".join(f"- {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in facts)


class Run(Results):
    """The results in a folder, of a run that has ended or was interrupted."""

    folder: Path

    def __init__(self, folder: str | Path) -> None:
        path = user_path(folder)
        manifest = read_manifest(path)
        if (measure := manifest["conditions"]["measure"]) != SCORE:
            raise ValueError(f"{path} holds no scored answers but the measure {measure!r}")
        super().__init__(read_rows(path), manifest, path)

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self.heading}>"

    def scores(self) -> dict[str, dict[str, float]]:
        """By setting: the score of each data set, 0 to 100, rounded to 0.01 like the benchmark's own."""
        names = self.summary.datasets
        return {
            setting: {name: round(self.summary.score(setting, name), 2) for name in names}
            for setting in self.summary.settings
        }

    def to_frame(self) -> pandas.DataFrame:
        """One row per item and setting, and environment if several timed it; needs pandas."""
        frame: pandas.DataFrame = package("pandas", "to_frame", "plots").json_normalize(self.rows)
        return frame

    def plot(self, file: str | Path | None = None) -> Path:
        """Draws the score against the speedup of the first token; needs matplotlib."""
        summary = self.summary
        dots = [
            Dot(setting, summary.speed(setting, "ttft").of_sums, *summary.mean(setting)) for setting in summary.settings
        ]
        return plot_scores(dots, DENSE_LABEL, user_path(file) if file else self.folder / PICTURE, self.heading)

    def draw(self) -> list[Path]:
        rows, pictures = self.summary.rows, []
        if self.manifest["conditions"].get("tasks") == NIAH and rows:
            pictures.append(plot_needle_map(needles_found(rows), self.folder / NEEDLE_MAP))
        by_turn: dict[str, dict[str, list[float]]] = {}
        for (name, setting), turns in turns_of(self.summary).items():
            by_turn.setdefault(name, {})[setting] = turns["score"].mean(axis=0).tolist()
        if by_turn:
            pictures.append(plot_turns(by_turn, DENSE_LABEL, self.folder / TURNS))
        pictures.append(self.plot())
        if panels := token_use_by_setting(rows):
            pictures.append(plot_token_use(panels, self.folder / TOKEN_USE))
        return pictures
