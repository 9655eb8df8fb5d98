"""The report of a run: written again after each table, as JSON and Markdown."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measuring.goals import Goal
from benchmarks.measuring.rounds import Times
from lazyllm.support.files import write_whole
from lazyllm.support.tables import Table

Figure = float | str | Times
JSON_FILE, TEXT_FILE, PLOT_FILE = "bench.json", "bench.md", "bench.png"


@dataclass(frozen=True)
class Row:
    """The measurements of one thing.

    `goals` maps the name of a figure to its goal, or to None where it has none. `keys` tell programs which
    engine, number of tokens and number of threads the label stands for.
    """

    label: str
    figures: Mapping[str, Figure]
    goals: Mapping[str, Goal | None] = field(default_factory=dict)
    keys: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def judged(self) -> list[tuple[str, Goal, float]]:
        """(figure's name, goal, value) for each figure that has a goal."""
        return [
            (name, goal, value)
            for name, goal in self.goals.items()
            if goal and isinstance(value := self.figures.get(name), float)
        ]

    def plain(self) -> dict[str, Any]:
        figures = {name: value.plain() if isinstance(value, Times) else value for name, value in self.figures.items()}
        goals = {
            name: {"goal": str(goal), "name": goal.name, "verdict": goal.verdict(value)}
            for name, goal, value in self.judged
        }
        return {"label": self.label, "keys": dict(self.keys), "figures": figures, "goals": goals}


@dataclass(frozen=True)
class Section:
    """The rows of one comparison, with a title and notes; a suite yields one or several, and the runner names
    it."""

    title: str
    rows: list[Row]
    notes: tuple[str, ...] = ()
    suite: str = ""

    @property
    def table(self) -> Table:
        names = list(dict.fromkeys(name for row in self.rows for name in row.figures))
        goal = ["goal"] if any(row.judged for row in self.rows) else []
        return Table(self.title, ["", *names, *goal], [self._cells(row, names) for row in self.rows])

    def _cells(self, row: Row, names: list[str]) -> list[str]:
        cells = [row.label, *(shown(row.figures[name]) if name in row.figures else "" for name in names)]
        if any(other.judged for other in self.rows):
            cells.append("; ".join(f"{goal} {goal.verdict(value)}" for _, goal, value in row.judged))
        return cells

    def text(self) -> str:
        """Aligned, for the terminal."""
        return "\n\n".join([self.title, *([self.table.text()] if self.rows else []), *self.notes])

    def markdown(self) -> str:
        table = [self.table.markdown()] if self.rows else []
        return "\n\n".join([f"### {self.title}", *table, *self.notes])


def shown(figure: Figure) -> str:
    if not isinstance(figure, float):
        return str(figure)
    return f"{figure:.3g}" if abs(figure) < 1000 else f"{figure:,.0f}"


class Report:
    """The results of a run so far, and the folder that they are written to."""

    def __init__(self, folder: Path, machine: dict[str, str], notes: list[str]) -> None:
        self.folder = folder
        self.machine = machine
        self.notes = notes
        self.sections: list[Section] = []
        self.failures: dict[str, str] = {}

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / JSON_FILE, json.dumps(self.plain(), indent=1) + "\n")
        write_whole(self.folder / TEXT_FILE, self.markdown())

    def plain(self) -> dict[str, Any]:
        tables = [
            {
                "suite": section.suite,
                "title": section.title,
                "notes": list(section.notes),
                "rows": [row.plain() for row in section.rows],
            }
            for section in self.sections
        ]
        return {"machine": self.machine, "notes": self.notes, "failures": self.failures, "tables": tables}

    def markdown(self) -> str:
        machine = Table("", ["machine", ""], [list(pair) for pair in self.machine.items()])
        parts = ["# Benchmarks of lazyllm", machine.markdown(), *self.notes]
        parts += [f"**The suite {suite} failed: {why}**" for suite, why in self.failures.items()]
        if goals := self.goals():
            parts += [f"## {goals.title}", goals.markdown()]
        suite = ""
        for section in self.sections:
            if section.suite != suite:
                suite = section.suite
                parts.append(f"## {suite}")
            parts.append(section.markdown())
        return "\n\n".join(parts) + "\n"

    def goals(self) -> Table | None:
        """Each goal with its worst value and the row that has it; None if no goal was judged."""
        found: dict[Goal, list[tuple[float, str]]] = {}
        for section in self.sections:
            for row in section.rows:
                for _, goal, value in row.judged:
                    found.setdefault(goal, []).append((value, f"{row.label} ({section.title})"))
        rows = []
        for goal, cases in found.items():
            worst = goal.worst([value for value, _ in cases])
            where = next(label for value, label in cases if value == worst)
            met = sum(goal.met(value) for value, _ in cases)
            tally = f"{goal.verdict(worst)} ({met} of {len(cases)})"
            rows.append([goal.name, str(goal), f"{worst:.4g}", tally, where])
        heads = ["goal", "bound", "worst", "result", "row of the worst"]
        return Table("Goals", heads, rows) if rows else None
