"""The report: tables as they come, written anew after each, as JSON, Markdown and a plot."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazyllm.bench.goals import Goal
from lazyllm.bench.rounds import Times

Figure = float | str | Times
JSON_FILE, TEXT_FILE, PLOT_FILE = "bench.json", "bench.md", "bench.png"


@dataclass(frozen=True)
class Row:
    """What was measured of one thing; `goals` holds those that its figures of the same name are up against.

    `keys` say the same as the label to a program: engine, tokens, threads.
    """

    label: str
    figures: dict[str, Figure]
    goals: dict[str, Goal] = field(default_factory=dict)
    keys: dict[str, str | int] = field(default_factory=dict)

    @property
    def verdicts(self) -> list[tuple[Goal, float]]:
        pairs = [(goal, self.figures[name]) for name, goal in self.goals.items() if name in self.figures]
        return [(goal, value) for goal, value in pairs if isinstance(value, float)]

    def plain(self) -> dict[str, Any]:
        figures = {
            name: value.plain() if isinstance(value, Times) else value for name, value in self.figures.items()
        }
        goals = {
            name: {"goal": str(goal), "what": goal.what, "verdict": goal.verdict(value)}
            for name, goal in self.goals.items()
            if isinstance(value := self.figures.get(name), float)
        }
        return {"label": self.label, "keys": self.keys, "figures": figures, "goals": goals}


@dataclass(frozen=True)
class Table:
    suite: str
    title: str
    rows: list[Row]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Markdown, with columns as wide as what they hold."""
        heading = f"### {self.title}\n"
        if not self.rows:
            return "\n".join([heading, *self.notes])
        names = list(dict.fromkeys(name for row in self.rows for name in row.figures))
        header, body = ["", *names], [self._cells(row, names) for row in self.rows]
        if any(row.verdicts for row in self.rows):
            header.append("goal")
        return "\n".join([heading, *aligned(header, body), *(f"\n{note}" for note in self.notes)])

    def _cells(self, row: Row, names: list[str]) -> list[str]:
        cells = [row.label, *(shown(row.figures[name]) if name in row.figures else "" for name in names)]
        if any(other.verdicts for other in self.rows):
            cells.append("; ".join(f"{goal} {goal.verdict(value)}" for goal, value in row.verdicts))
        return cells


def shown(figure: Figure) -> str:
    return f"{figure:.3g}" if isinstance(figure, float) and abs(figure) < 1000 else str_of(figure)


def str_of(figure: Figure) -> str:
    return f"{figure:,.0f}" if isinstance(figure, float) else str(figure)


def aligned(header: list[str], body: list[list[str]]) -> list[str]:
    widths = [max(3, *(len(line[column]) for line in [header, *body])) for column in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    return [line(header), line(["-" * width for width in widths]), *map(line, body)]


class Report:
    """What a run has found so far, in its folder."""

    def __init__(self, folder: Path, machine: dict[str, Any], notes: list[str]) -> None:
        self.folder = folder
        self.machine = machine
        self.notes = notes
        self.tables: list[Table] = []
        self.failures: dict[str, str] = {}

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        replaced(self.folder / JSON_FILE, json.dumps(self.plain(), indent=1) + "\n")
        replaced(self.folder / TEXT_FILE, self.text())

    def plain(self) -> dict[str, Any]:
        tables = [
            {
                "suite": table.suite,
                "title": table.title,
                "notes": list(table.notes),
                "rows": [row.plain() for row in table.rows],
            }
            for table in self.tables
        ]
        return {
            "machine": self.machine,
            "notes": self.notes,
            "failures": self.failures,
            "tables": tables,
        }

    def text(self) -> str:
        parts = ["# Benchmarks of lazyllm", ""]
        parts += aligned(["machine", ""], [[name, str(value)] for name, value in self.machine.items()])
        parts += [f"\n{note}" for note in self.notes]
        parts += [f"\n**The suite {suite} failed: {why}**" for suite, why in self.failures.items()]
        if goals := self.goals_table():
            parts += ["", "## Goals", "", *goals]
        suite = ""
        for table in self.tables:
            if table.suite != suite:
                suite = table.suite
                parts += ["", f"## {suite}"]
            parts += ["", table.text()]
        return "\n".join(parts) + "\n"

    def goals_table(self) -> list[str]:
        """Each goal with the worst of all values that it was measured by."""
        found: dict[Goal, list[tuple[float, str]]] = {}
        for table in self.tables:
            for row in table.rows:
                for goal, value in row.verdicts:
                    found.setdefault(goal, []).append((value, f"{row.label} ({table.title})"))
        body = []
        for goal, cases in found.items():
            worst = goal.worst([value for value, _ in cases])
            where = next(label for value, label in cases if value == worst)
            met = sum(goal.met(value) for value, _ in cases)
            tally = f"{goal.verdict(worst)} ({met} of {len(cases)})"
            body.append([goal.what, str(goal), f"{worst:.4g}", tally, where])
        header = ["goal", "wanted", "worst", "", "where the worst is"]
        return aligned(header, body) if body else []


def replaced(path: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
