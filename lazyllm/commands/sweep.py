"""`lazyllm sweep`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options
from lazyllm.evaluation.options import DataOptions

SUMMARY = "try many settings on the same prompts: divergence from dense, speed, a Pareto picture; it resumes"
EXAMPLE = "--speedup 1.5 --speedup 2 --speedup 3 --out sweep"


def add(parser: argparse.ArgumentParser) -> None:
    options.add_pruning(parser)
    space = (
        'in place of --pruning: lists of values as JSON, whose product is taken, such as {"layer": '
        '[5, 10], "keep": [0.5, 0.7]} (one stage) or {"stages": [{"10": 0.7}], "smooth": [1, 13]}'
    )
    options.add(parser, "--space", space, "AXES")
    measure = "kl (default): dense's own answer teacher-forced; score: answers, scored; or both"
    options.add(parser, "--measure", measure)
    options.add(parser, "--tokens", "of dense's answer at most, default 16", "N")
    options.add_run(parser, DataOptions)


def run(args: argparse.Namespace) -> int:
    from lazyllm.support.json_text import parse_json
    from lazyllm.sweeps.sweep import sweep

    keywords = options.of_run(args, DataOptions, "measure", "tokens")
    if ("space" in args) == ("pruning" in args):
        raise ValueError("give --space, or --pruning once for each setting")
    space = keywords.pop("pruning") if "pruning" in args else parse_json(args.space, "--space", strict=True)
    return options.print_result(sweep(options.loaded(args), space, **keywords))
