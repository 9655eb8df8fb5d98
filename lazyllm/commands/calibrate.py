"""`lazyllm calibrate`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options

SUMMARY = "try a few schedules of a wished speedup on a checkpoint; the best is a preset; it resumes"
EXAMPLE = "--model DIR --speedup 2.5 --out preset.json"


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add(parser, "--speedup", "counted speedup of prefill, default 2.5", "X")
    own = "a prompt of yours beside the generated ones (repeatable)"
    options.add(parser, "--prompt-file", own, "FILE", action="append")
    lengths = "tokens of the generated prompts with their answers, default 1024,2048"
    options.add(parser, "--lengths", lengths, "N,…")
    out = "the preset, such as preset.json; --pruning takes it. The folder preset.calibration is resumed"
    options.add(parser, "--out", out, "FILE", type=options.out_file, required=True)
    options.add_device(parser)


def run(args: argparse.Namespace) -> int:
    from lazyllm.calibration.calibrate import calibrate, checked_file

    checked_file(args.out)
    prompts = options.read_prompts(args)
    keywords = options.keywords_of(args, "speedup", "lengths", "out")
    print(f"{calibrate(options.loaded(args), prompts, **keywords)!r}\n\nwrote {args.out}")
    return 0
