"""`lazyllm convert`"""

from __future__ import annotations

import argparse

SUMMARY = "write a GGUF file of a Llama-family model or of Gemma 3 as a folder in Hugging Face layout"
EXAMPLE = "model.gguf model-folder"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("gguf", help="the GGUF file")
    parser.add_argument("out", help="the folder to make")
    parser.add_argument("--dtype", default="bf16", help="of the weights: bf16 (default), f16 or f32")


def run(args: argparse.Namespace) -> int:
    from lazyllm.checkpoints.gguf import convert

    print(convert(args.gguf, args.out, args.dtype))
    return 0
