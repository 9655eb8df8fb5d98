"""`lazyllm ruler`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options
from lazyllm.evaluation.options import RulerOptions

SUMMARY = "run generated long-context tasks like RULER's under one setting or several; run again, it resumes"
EXAMPLE = """--model DIR --lengths 1024,4096 --pruning dense --pruning '{"10": 0.7}' --out run"""


def add(parser: argparse.ArgumentParser) -> None:
    options.add_pruning(parser)
    options.add_run(parser, RulerOptions)


def run(args: argparse.Namespace) -> int:
    from lazyllm.longbench import run_ruler

    result = run_ruler(options.loaded(args), **options.of_run(args, RulerOptions))
    return options.print_result(result)
