"""`lazyllm longbench`"""

from __future__ import annotations

import argparse
import sys

from lazyllm.commands import options
from lazyllm.evaluation.options import DataOptions

SUMMARY = "run LongBench under one setting or several, time it, score it; run again, it resumes"
EXAMPLE = """--model DIR --data LONGBENCH --pruning dense --pruning '{"10": 0.7}' --out run"""


def add(parser: argparse.ArgumentParser) -> None:
    options.add_pruning(parser)
    options.add_run(parser, DataOptions)


def run(args: argparse.Namespace) -> int:
    from lazyllm.evaluation.longbench.items import GET
    from lazyllm.longbench import run

    if "data" not in args:
        print(f"without --data the tasks are generated; {GET}", file=sys.stderr)
    result = run(options.loaded(args), **options.of_run(args, DataOptions))
    return options.print_result(result)
