"""`lazyllm search`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options

SUMMARY = "search stages and options that lose least, by Optuna; it resumes, and processes share the work"
EXAMPLE = "--model DIR --speedup 1.5,3 --budget 40 --out search"


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--speedup",
        type=speedups,
        default=argparse.SUPPRESS,
        metavar="LOW,HIGH",
        help="range of counted speedups of prefill, default 1.5,3",
    )
    parser.add_argument(
        "--budget",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="settings to try, by all processes with the same --out, default 40",
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help="a prompt of yours (repeatable, at least 3); default: generated ones with needles",
    )
    parser.add_argument(
        "--start",
        action="append",
        default=[],
        metavar="SETTING",
        help="try this first: a preset's file, or a setting such as --pruning takes (repeatable)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the proposals, default 0")
    parser.add_argument(
        "--preset",
        type=float,
        metavar="X",
        help="write preset.json: the setting that diverges least with a speedup of at least X",
    )
    parser.add_argument(
        "--out", required=True, type=options.out_folder, metavar="DIR", help="a search there continues"
    )
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    from lazyllm.commands.generate import read_prompt
    from lazyllm.searching.search import RANGE, search
    from lazyllm.searching.study import optuna_module

    optuna_module()
    prompts = [read_prompt(file) for file in args.prompt_file] if args.prompt_file else None
    keywords = options.given(args, "speedup", "budget", "start", "seed", "out")
    fastest = max(keywords.get("speedup", RANGE))
    if args.preset is not None and args.preset > fastest:
        raise ValueError(
            f"--preset must be at most {fastest:g}, the end of the range of speedups, not {args.preset:g}"
        )
    result = search(options.loaded(args), prompts, **keywords)
    print(f"{result.text()}\n\nwrote {result.folder}")
    if args.preset is not None:
        print(f"wrote {result.preset(speedup=args.preset).save(args.out / 'preset.json')}")
    return 0


def speedups(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of numbers such as 1.5,3") from None
