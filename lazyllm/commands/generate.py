"""`lazyllm generate`"""

from __future__ import annotations

import argparse
import sys

from lazyllm.commands import options

SUMMARY = "answer a prompt, the text on stdout and one line of figures on stderr"
EXAMPLE = "--chat --prompt-file question.txt --speedup 2"


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    options.add(prompt, "--prompt", "the text, or - for standard input", "TEXT")
    options.add(prompt, "--prompt-file", "a file with the text, or - for standard input", "FILE")
    options.add_pruning(parser, action="store")
    options.add(parser, "--chat", "put the prompt through the chat template", action="store_true")
    options.add(parser, "--max-new-tokens", "default 128", "N")
    options.add(parser, "--stop", "end before this text (repeatable)", "TEXT", action="append")
    options.add(parser, "--temperature", "default 0, greedy", "X")
    options.add(parser, "--top-p", "default 1, off", "X")
    options.add(parser, "--top-k", "default 0, off", "N")
    options.add(parser, "--min-p", "default 0, off", "X")
    options.add(parser, "--repetition-penalty", "default 1, off", "X")
    options.add(parser, "--seed", "of the draws; default a new one each time", "N")
    options.add_device(parser)
    heatmap = "write the prompt, coloured by depth, as HTML"
    options.add(parser, "--heatmap", heatmap, "FILE", type=options.out_file)


def run(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from lazyllm.methods.parsing import as_method
    from lazyllm.sampling import SamplingParams

    keywords = options.keywords_of(args, "max_new_tokens", "stop", "chat")
    keywords["pruning"] = as_method(vars(args).get("pruning"))
    keywords["sampling"] = SamplingParams(
        **options.keywords_of(args, *(field.name for field in fields(SamplingParams)))
    )
    from_file = "prompt_file" in args or args.prompt == "-"
    text = options.read_prompt(vars(args).get("prompt_file", "-")) if from_file else args.prompt
    stream = options.loaded(args).stream(text, trace="heatmap" in args, **keywords)
    for piece in stream:
        print(piece, end="", flush=True)
    print(flush=True)
    answer = stream.finished()
    print(f"[{answer.summary}]", file=sys.stderr)
    if "heatmap" in args:
        print(f"[wrote {answer.trace.heatmap().save(args.heatmap)}]", file=sys.stderr)
    return 0
