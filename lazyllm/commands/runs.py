"""`lazyllm longbench`, `niah` and `ruler`: a function of lazyllm.longbench each, with its options."""

from __future__ import annotations

import argparse
import sys

from lazyllm.commands import options
from lazyllm.evaluation.options import DataOptions, NiahOptions, RulerOptions, RunOptions


def command(function: str, kind: type[RunOptions], summary: str, example: str) -> options.Command:
    def add(parser: argparse.ArgumentParser) -> None:
        options.add_pruning(parser)
        options.add_run(parser, kind)

    def run(args: argparse.Namespace) -> int:
        from lazyllm import longbench
        from lazyllm.evaluation.longbench.items import GET

        if kind is DataOptions and "data" not in args:
            print(f"without --data the tasks are generated; {GET}", file=sys.stderr)
        result = getattr(longbench, function)(options.loaded(args), **options.of_run(args, kind))
        return options.print_result(result)

    return options.Command(summary, f"--model DIR {example} --out run", add, run)


PRUNING = "--pruning dense --speedup 2"
LONGBENCH = command(
    "run",
    DataOptions,
    "run LongBench under one setting or several, time it, score it; run again, it resumes",
    f"--data LONGBENCH {PRUNING}",
)
RULER = command(
    "run_ruler",
    RulerOptions,
    "run generated long-context tasks like RULER's under one setting or several; run again, it resumes",
    f"--lengths 1024,4096 {PRUNING}",
)
NIAH = command(
    "run_niah",
    NiahOptions,
    "look for a needle at every depth of texts of several lengths, and draw a heat map",
    "--lengths 1024,2048,4096,8000 --depths 0,25,50,75,100",
)
