"""`lazyllm reproduce`"""

from __future__ import annotations

import argparse
import sys

from lazyllm.commands import options
from lazyllm.evaluation.options import OF_PRESET, DataOptions

SUMMARY = "make the paper's tables and figures for a checkpoint; run again, it runs what is missing"
EXAMPLE = "table1 figure7 --model Llama-2-7b-chat-hf --data LONGBENCH --out reproduction"


def add(parser: argparse.ArgumentParser) -> None:
    targets = "table1, table2, figure1, figure2, figure5, figure6, figure7"
    parser.add_argument("targets", nargs="+", metavar="WHAT", help=targets)
    preset = "llama-2-7b-chat, xgen-7b-8k-inst or smollm2-135m-instruct; default: by the checkpoint's name"
    options.add(parser, "--preset", preset, "NAME")
    options.add(parser, "--speedup", "of all methods, by counted work; default that of the preset", "X")
    options.add(parser, "--seeds", "of random drop, default 5", "N")
    methods = "random, static, compress, fastkv, claa, gemfilter, lazyllm, recommended; default: all"
    options.add(parser, "--methods", methods, "NAME,…")
    options.add_run(parser, DataOptions, max_length=OF_PRESET, wrapper=OF_PRESET)


def run(args: argparse.Namespace) -> int:
    from lazyllm.reproduce import reproduce

    keywords = options.of_run(args, DataOptions, "preset", "speedup", "seeds", "methods")
    result = reproduce(options.loaded(args), args.targets, **keywords)
    print("\n".join([result.text(), "", *(f"wrote {path}" for path in result.files)]).lstrip())
    if result.failed:
        print(f"{result.failed} results failed; items.jsonl of the runs says why", file=sys.stderr)
    return 1 if result.failed else 0
