"""`lazyllm longbench`"""

from __future__ import annotations

import argparse
import sys

from lazyllm.commands import options


def add(commands: options.Commands) -> None:
    parser = options.new_command(
        commands,
        "longbench",
        run,
        "run LongBench under one setting or several, time it, score it; run again, it resumes",
        example="longbench --model DIR --data LONGBENCH --pruning dense "
        """--pruning '{"10": 0.7}' --out run""",
    )
    options.add_run(parser)
    options.add_data(parser)
    options.add_max_length(parser)
    parser.add_argument("--edit-sim", default="difflib", help="of code: difflib (default) or levenshtein")


def run(args: argparse.Namespace) -> int:
    from lazyllm.evaluation.longbench.items import GET
    from lazyllm.longbench import run

    if args.data is None:
        print(f"without --data the tasks are generated; {GET}", file=sys.stderr)
    given = options.chosen(args, *options.DATA, "edit_sim")
    return options.told(run(options.loaded(args), args.pruning, **given))
