"""Runs the suites; every table is printed and written as soon as it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.measuring.machine import machine
from benchmarks.measuring.plot import plot
from benchmarks.measuring.report import PLOT_FILE, Report
from benchmarks.options import FULL, Options
from benchmarks.suites import SUITES


def run(suites: Sequence[str], options: Options, out: Path, notes: Sequence[str]) -> int:
    """Returns 1 if a suite failed, else 0; a missed goal is not a failure."""
    left_out = {} if options.widest.on_cpu else {name: SUITES[name].cpu_only for name in suites}
    sentences = [f"{name} is left out: {reason}." for name, reason in left_out.items() if reason]
    report = Report(out, machine(options.widest), [*notes, *sentences, rounds_note(options)])
    print(*report.notes, sep="\n")
    report.write()
    try:
        for name in suites:
            if not left_out.get(name):
                run_suite(name, options, report)
    finally:
        finish(report)
    return 1 if report.failures else 0


def run_suite(name: str, options: Options, report: Report) -> None:
    print(f"\n## {name}", flush=True)
    try:
        for section in SUITES[name].measure(options):
            rows = section.rows if options.judged else [replace(row, goals={}) for row in section.rows]
            section = replace(section, suite=name, rows=rows)
            print(f"\n{section.text()}", flush=True)
            report.sections.append(section)
            report.write()
    except (ValueError, RuntimeError, OSError, ImportError, MemoryError) as error:
        report.failures[name] = " ".join(str(error).split()) or type(error).__name__
        print(f"\nThe suite {name} failed: {report.failures[name]}", flush=True)
        report.write()


def finish(report: Report) -> None:
    if goals := report.goals():
        print(f"\n## {goals.title}\n\n{goals.text()}")
    try:
        plot(report.sections, report.folder / PLOT_FILE)
    except ImportError as error:
        print(f"\nskipped {PLOT_FILE}: {error}")
    print(f"\nwrote {report.folder}")


def rounds_note(options: Options) -> str:
    timed = f"Times are medians of {options.rounds} rounds (lowest to highest), after one to warm up."
    if options.judged:
        return timed
    return f"{timed} No goal is judged: that takes full lengths (no --quick) and {FULL['rounds']} rounds."
