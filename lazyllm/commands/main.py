"""Entry point of the command `lazyllm`: the list of commands, exit codes and the error line."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from lazyllm import __version__
from lazyllm.commands import runs, small
from lazyllm.commands.demo import demo
from lazyllm.commands.options import Run
from lazyllm.commands.serve import serve

COMMANDS: dict[Callable[[argparse.ArgumentParser], Run], str] = {
    small.info: "",
    small.generate: "--chat --prompt-file question.txt --speedup 2",
    small.convert: "model.gguf model-folder",
    small.model: "gemma3-270m gemma-folder",
    demo: "--out demo-output",
    runs.longbench: "--model DIR --data LONGBENCH --pruning dense --speedup 2 --out run",
    runs.ruler: "--model DIR --lengths 1024,4096 --pruning dense --speedup 2 --out run",
    runs.niah: "--model DIR --lengths 1024,2048,4096,8000 --depths 0,25,50,75,100 --out run",
    runs.reproduce: "table1 figure7 --model Llama-2-7b-chat-hf --data LONGBENCH --out reproduction",
    runs.sweep: "--speedup 1.5 --speedup 2 --speedup 3 --out sweep",
    runs.report: "here/run there/run --out both",
    runs.calibrate: "--model DIR --speedup 2.5 --out preset.json",
    runs.search: "--model DIR --speedup 1.5,3 --budget 40 --out search",
    serve: "--model DIR --speedup 2 --port 8000",
    small.lm_eval: "--model lazyllm --tasks arc_easy "
    """--model_args '{"pretrained": "DIR", "pruning": "2x"}'""",
}
"""The commands in the order of --help, each with an example of its arguments. The function of a command adds the
arguments to its parser and returns the function that runs it; its docstring is the help."""
USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0 is success, 1 means that some items failed, 2 is an error (one line on stderr), 130 is Ctrl-C, and 141
    means that the reader of stdout is gone.
    """
    args, unknown = parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of its command
    try:
        return int(args.run(args) or 0)
    except KeyboardInterrupt:
        from lazyllm.evaluation.results import MANIFEST

        resumes = "out" in args and (Path(args.out) / MANIFEST).is_file()
        print(f"lazyllm: interrupted{'; the same command goes on from here' if resumes else ''}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail too
        return BROKEN_PIPE
    except (ValueError, TypeError, OSError, MemoryError, ImportError, RuntimeError) as error:
        if os.environ.get("LAZYLLM_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        print(f"lazyllm: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return USAGE_ERROR


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="lazyllm",
        description="Language models with dynamic token pruning (LazyLLM).",
        epilog="example:\n  lazyllm demo\n\n"
        "environment:\n  LAZYLLM_PROGRESS=0  no progress bars\n  LAZYLLM_DEBUG=1     tracebacks of errors",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"lazyllm {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command, example in COMMANDS.items():
        name, summary = command.__name__.replace("_", "-"), command.__doc__ or ""
        subparser = commands.add_parser(
            name,
            help=summary[:1].lower() + summary[1:].removesuffix("."),
            description=summary,
            epilog=f"example:\n  lazyllm {name} {example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.set_defaults(run=command(subparser), parser=subparser)
    return top
