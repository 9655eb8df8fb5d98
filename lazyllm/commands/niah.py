"""`lazyllm niah`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options


def add(commands: options.Commands) -> None:
    parser = options.new_command(
        commands,
        "niah",
        run,
        "look for a needle at every depth of texts of several lengths, and draw a heat map",
        example="niah --model DIR --lengths 1024,2048,4096,8000 --depths 0,25,50,75,100 --out run",
    )
    options.add_run(parser)
    options.add_generated(parser)
    parser.add_argument(
        "--depths",
        type=options.whole_numbers,
        default=argparse.SUPPRESS,
        metavar="P,…",
        help="in percent; default every tenth from 0 to 100",
    )


def run(args: argparse.Namespace) -> int:
    from lazyllm.longbench import run_niah

    given = options.chosen(args, *options.GENERATED, "depths")
    return options.told(run_niah(options.loaded(args), args.pruning, **given))
