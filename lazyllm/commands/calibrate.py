"""`lazyllm calibrate`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options

SUMMARY = "find the stages that lose least on a checkpoint at a wished speedup, as a preset; it resumes"
EXAMPLE = "--model DIR --speedup 2.5 --out preset.json"


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--speedup",
        type=float,
        default=argparse.SUPPRESS,
        metavar="X",
        help="counted speedup of prefill, default 2.5",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a prompt of yours beside the generated ones (repeatable); every third is kept for the trials",
    )
    parser.add_argument(
        "--lengths",
        type=options.whole_numbers,
        default=argparse.SUPPRESS,
        metavar="N,…",
        help="tokens of the generated prompts with their answers, default 1024,2048",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=options.out_file,
        metavar="FILE",
        help="the preset, such as preset.json; --pruning takes it. The folder preset.calibration is resumed",
    )
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    from lazyllm.calibration.calibrate import calibrate, checked_file
    from lazyllm.commands.generate import read_prompt

    checked_file(args.out)
    prompts = [read_prompt(file) for file in args.prompt_file]
    keywords = options.given(args, "speedup", "lengths", "out")
    print(f"{calibrate(options.loaded(args), prompts, **keywords)!r}\n\nwrote {args.out}")
    return 0
