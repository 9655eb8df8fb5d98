"""`lazyllm generate`"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lazyllm.commands import options

SUMMARY = "answer a prompt, the text on stdout and one line of figures on stderr"
EXAMPLE = """--chat --prompt-file question.txt --pruning '{"10": 0.7, "20": 0.5}'"""


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", type=options.utf8, metavar="TEXT", help="the text, or - for standard input"
    )
    prompt.add_argument("--prompt-file", metavar="FILE", help="a file with the text, or - for standard input")
    parser.add_argument(
        "--pruning",
        metavar="METHOD",
        default="dense",
        help='stages such as {"10": 0.7} or all of a Pruning as JSON; dense, random:keep=0.5, '
        "static:layers=8,keep=0.5, compress:ratio=0.5, fastkv:layer=14,keep=0.2, claa:layer=14,keep=0.2, "
        "gemfilter:layer=12,keep=0.1 or the file of a preset",
    )
    parser.add_argument("--chat", action="store_true", help="put the prompt through the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        type=options.utf8,
        metavar="TEXT",
        help="end before this text (repeatable)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0, greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default 1, off")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="default 0, off")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws, default 0")
    options.add_device(parser)
    parser.add_argument(
        "--heatmap",
        type=options.out_file,
        metavar="FILE",
        help="write the prompt, coloured by depth, as HTML",
    )


def run(args: argparse.Namespace) -> int:
    from lazyllm.methods import parse_method
    from lazyllm.sampling import SamplingParams

    pruning = parse_method(args.pruning)
    sampling = SamplingParams(args.temperature, args.top_p, args.top_k, args.seed)
    text = args.prompt if args.prompt not in (None, "-") else read_prompt(args.prompt_file or "-")
    stream = options.loaded(args).stream(
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
    answer = stream.finished()
    print(f"[{answer.summary}]", file=sys.stderr)
    if args.heatmap:
        print(f"[wrote {answer.trace.heatmap().save(args.heatmap)}]", file=sys.stderr)
    return 0


def read_prompt(file: str) -> str:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        text.encode("utf-8")  # in the C locale, standard input gives lone surrogates in place of an error
    except UnicodeError as error:
        source = "standard input" if file == "-" else file
        raise ValueError(f"{source} is not valid UTF-8: {error}") from None
    return text
