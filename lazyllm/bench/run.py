"""A whole run: suite after suite, everything written as soon as it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lazyllm.bench.decode import decode
from lazyllm.bench.generation import generation
from lazyllm.bench.machine import machine
from lazyllm.bench.memory import memory
from lazyllm.bench.ops import ops
from lazyllm.bench.options import ROUNDS, Options
from lazyllm.bench.plot import plot
from lazyllm.bench.prefill import prefill
from lazyllm.bench.pruned import pruned
from lazyllm.bench.report import PLOT_FILE, Report, Table
from lazyllm.bench.scaling import scaling
from lazyllm.bench.shapes import shapes

Suite = Callable[[Options], Iterator[Table]]
SUITES: dict[str, Suite] = {
    "ops": ops,
    "prefill": prefill,
    "pruned": pruned,
    "decode": decode,
    "scaling": scaling,
    "memory": memory,
    "shapes": shapes,
    "generation": generation,
}
"""In the order in which they run."""
ALL = "all"
ON_CPU_ONLY = {
    "scaling": "it compares numbers of threads",
    "memory": "it measures what a process of the CPU takes",
}
DEFAULT_SUITES = tuple(name for name in SUITES if name not in ("shapes", "generation"))


def chosen_suites(names: Sequence[str]) -> tuple[str, ...]:
    """The named suites, all of them, or without a name those that take minutes."""
    if unknown := [name for name in names if name not in (*SUITES, ALL)]:
        raise ValueError(f"there is no suite {unknown[0]!r}; the suites are {', '.join(SUITES)}, or {ALL}")
    return tuple(SUITES) if ALL in names else tuple(names) or DEFAULT_SUITES


def run(suites: Sequence[str], options: Options, out: Path, notes: Sequence[str]) -> int:
    """Prints and writes every table as it comes; 1 if a suite failed, else 0. Goals missed are no failure."""
    left_out = [] if options.widest.on_cpu else [name for name in ON_CPU_ONLY if name in suites]
    sentences = [f"{name} is left out: {ON_CPU_ONLY[name]}." for name in left_out]
    report = Report(out, machine(options.widest), [*notes, *sentences, rounds_note(options)])
    for note in report.notes:
        print(note)
    report.write()
    try:
        for name in (name for name in SUITES if name in suites and name not in left_out):
            run_suite(name, options, report)
    finally:
        finish(report)
    return 1 if report.failures else 0


def run_suite(name: str, options: Options, report: Report) -> None:
    print(f"\n## {name}", flush=True)
    try:
        for table in SUITES[name](options):
            print(f"\n{table.text()}", flush=True)
            report.tables.append(table)
            report.write()
    except (ValueError, RuntimeError, OSError, ImportError, MemoryError) as error:
        report.failures[name] = " ".join(str(error).split()) or type(error).__name__
        print(f"\nThe suite {name} failed: {report.failures[name]}", flush=True)
        report.write()


def finish(report: Report) -> None:
    if goals := report.goals_table():
        print("\n## Goals\n", *goals, sep="\n")
    try:
        plot(report.tables, report.folder / PLOT_FILE)
    except ImportError as error:
        print(f"\nskipped {PLOT_FILE}: {error}")
    print(f"\nwrote {report.folder}")


def rounds_note(options: Options) -> str:
    few = f", fewer than the {ROUNDS} that a claim needs" if options.rounds < ROUNDS else ""
    return f"Times are medians of {options.rounds} rounds (lowest to highest), after one to warm up{few}."
