"""Entry point of the command `lazyllm`: the list of commands, exit codes and the error line."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from lazyllm.commands import calibrate, demo, generate, report, reproduce, runs, search, small, sweep

COMMANDS: dict[str, Any] = {
    "info": small.INFO,
    "generate": generate,
    "convert": small.CONVERT,
    "model": small.MODEL,
    "demo": demo,
    "longbench": runs.LONGBENCH,
    "ruler": runs.RULER,
    "niah": runs.NIAH,
    "reproduce": reproduce,
    "sweep": sweep,
    "report": report,
    "calibrate": calibrate,
    "search": search,
    "lm-eval": small.LM_EVAL,
}
"""In the order that --help lists them: a `Command`, or a module with its fields."""
USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0 is success, 1 means that some items failed, 2 is an error (one line on stderr), 130 is Ctrl-C, and 141
    means that the reader of stdout is gone.
    """
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("lazyllm: interrupted", file=sys.stderr)
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
        description="Llama-family models and Gemma 3 with dynamic token pruning (LazyLLM).",
        epilog="example:\n  lazyllm demo\n\n"
        "environment:\n  LAZYLLM_PROGRESS=0  no progress bars\n  LAZYLLM_DEBUG=1     tracebacks of errors",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=f"{module.SUMMARY[0].upper()}{module.SUMMARY[1:]}.",
            epilog=f"example:\n  lazyllm {name} {module.EXAMPLE}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=module.run)
        module.add(command)
    return top
