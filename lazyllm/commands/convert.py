"""`lazyllm convert`"""

from __future__ import annotations

import argparse

from lazyllm.commands import options


def add(commands: options.Commands) -> None:
    parser = options.new_command(
        commands,
        "convert",
        run,
        "write a GGUF file of a Llama-family model or of Gemma 3 as a folder in Hugging Face layout",
        example="convert model.gguf model-folder",
    )
    parser.add_argument("gguf", help="the GGUF file")
    parser.add_argument("out", help="the folder to make")
    parser.add_argument("--dtype", default="bf16", help="of the weights: bf16 (default), f16 or f32")


def run(args: argparse.Namespace) -> int:
    from lazyllm.checkpoints.gguf import convert

    print(convert(args.gguf, args.out, args.dtype))
    return 0
