"""`lazyllm niah`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options
from lazyllm.evaluation.options import NiahOptions

SUMMARY = "look for a needle at every depth of texts of several lengths, and draw a heat map"
EXAMPLE = "--model DIR --lengths 1024,2048,4096,8000 --depths 0,25,50,75,100 --out run"


def add(parser: argparse.ArgumentParser) -> None:
    options.add_pruning(parser)
    options.add_run(parser, NiahOptions)


def run(args: argparse.Namespace) -> int:
    from lazyllm.longbench import run_niah

    result = run_niah(options.loaded(args), **options.of_run(args, NiahOptions))
    return options.print_result(result)
