"""`lazyllm search`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options

SUMMARY = "search stages and options that lose least, by Optuna; it resumes, and processes share the work"
EXAMPLE = "--model DIR --speedup 1.5,3 --budget 40 --out search"


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    speedup = "range of counted speedups of prefill, default 1.5,3"
    options.add(parser, "--speedup", speedup, "LOW,HIGH", type=speedups)
    budget = "settings to try, by all processes with the same --out, default 40"
    options.add(parser, "--budget", budget, "N")
    own = "a prompt of yours (repeatable, at least 3); default: generated ones with needles"
    options.add(parser, "--prompt-file", own, "FILE", action="append")
    options.add(parser, "--seed", "of the proposals, default 0", "N")
    preset = "write preset.json: the setting that diverges least with a speedup of at least X"
    options.add(parser, "--preset", preset, "X")
    options.add_out(parser, "a search there continues")
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    from lazyllm.searching.search import search

    keywords = options.keywords_of(args, "speedup", "budget", "seed", "out")
    result = search(options.loaded(args), options.read_prompts(args), **keywords)
    print(f"{result.text()}\n\nwrote {result.folder}")
    if "preset" in args:
        print(f"wrote {result.preset(speedup=args.preset).save(args.out / 'preset.json')}")
    return 0


def speedups(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
