"""`lazyllm reproduce`"""

from __future__ import annotations

import argparse
import sys

from lazyllm.commands import options


def add(commands: options.Commands) -> None:
    parser = options.new_command(
        commands,
        "reproduce",
        run,
        "make the paper's tables and figures for a checkpoint; run again, it runs what is missing",
        example="reproduce table1 figure7 --model Llama-2-7b-chat-hf --data LONGBENCH --out reproduction",
    )
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="WHAT",
        help="table1, table2, figure1, figure2, figure5, figure6, figure7",
    )
    options.add_model(parser)
    parser.add_argument(
        "--preset",
        metavar="NAME",
        help="llama-2-7b-chat, xgen-7b-8k-inst or smollm2-135m-instruct; default: by the checkpoint's name",
    )
    options.add_data(parser)
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of a prompt; default: the preset's"
    )
    parser.add_argument(
        "--speedup", type=float, metavar="X", help="of all methods, by counted work; default: the preset's"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="of random drop, default 5")
    parser.add_argument(
        "--methods",
        type=options.names,
        metavar="NAME,…",
        help="random, static, compress, fastkv, claa, gemfilter, lazyllm, recommended; default: all",
    )
    parser.add_argument("--chat", help=f"{options.CHATS}; default: the preset's")
    options.add_folder(parser)


def run(args: argparse.Namespace) -> int:
    from lazyllm.reproduce import reproduce

    given = options.chosen(args, *options.DATA, "preset", "speedup", "seeds", "methods")
    made = reproduce(options.loaded(args), args.targets, **given)
    print("\n".join([made.text(), "", *(f"wrote {path}" for path in made.files)]).lstrip())
    if made.failed:
        print(f"{made.failed} results failed; items.jsonl of the runs says why", file=sys.stderr)
    return 1 if made.failed else 0
