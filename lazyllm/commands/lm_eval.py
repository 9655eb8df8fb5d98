"""`lazyllm lm-eval`"""

from __future__ import annotations

import argparse

SUMMARY = "run the lm-evaluation-harness, which then knows the model type lazyllm"
EXAMPLE = (
    "--model lazyllm --tasks arc_easy "
    """--model_args '{"pretrained": "DIR", "pruning": {"10": 0.7, "20": 0.5}}'"""
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.prefix_chars = "+"  # every option is passed on to the harness
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the harness' own; run --help shows them")
    parser.set_defaults(show_help=parser.print_help)


def run(args: argparse.Namespace) -> int:
    if args.arguments in ([], ["-h"], ["--help"]):
        args.show_help()
        return 0
    from lazyllm.evaluation.harness import main

    main(args.arguments)
    return 0
