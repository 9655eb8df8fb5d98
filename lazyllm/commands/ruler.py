"""`lazyllm ruler`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options


def add(commands: options.Commands) -> None:
    parser = options.new_command(
        commands,
        "ruler",
        run,
        "run generated long-context tasks like RULER's under one setting or several; run again, it resumes",
        example="ruler --model DIR --lengths 1024,4096 --pruning dense "
        """--pruning '{"10": 0.7}' --out run""",
    )
    options.add_run(parser)
    options.add_generated(parser)
    parser.add_argument("--tasks", type=options.names, metavar="NAME,…", help="default: all of them")
    parser.add_argument(
        "--qa",
        metavar="DIR",
        help="squad.json and hotpotqa.json, the files that RULER downloads, or LongBench, for qa_1 and qa_2",
    )


def run(args: argparse.Namespace) -> int:
    from lazyllm.longbench import run_ruler

    given = options.chosen(args, *options.GENERATED, "tasks", "qa")
    return options.told(run_ruler(options.loaded(args), args.pruning, **given))
