"""`lazyllm demo`: one question about a long document, answered dense and pruned in turn."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lazyllm.commands import options

if TYPE_CHECKING:
    from lazyllm.generation import Generation
    from lazyllm.llm import LLM

DOCUMENT = Path(__file__).with_name("demo_document.txt")
QUESTION = "What is the smallest bell called?"
KNOWN_ANSWER = "Sparrow"
SPEEDUP = 2.0  # of prefill, by counted work
MAX_NEW_TOKENS = 40
TIMED_RUNS = 3
WARM_UP_TOKENS = 64
LABEL_WIDTH, COLUMN_WIDTH = 13, 40


@dataclass(frozen=True)
class Side:
    """One of the two settings: its answer, and the time to first token of each of its runs in seconds."""

    name: str
    made: Generation
    ttfts: list[float]

    @cached_property
    def ttft(self) -> float:
        from statistics import median

        return median(self.ttfts)

    @property
    def right(self) -> bool:
        return KNOWN_ANSWER.casefold() in self.made.text.casefold()


def add(commands: options.Commands) -> None:
    parser = options.new_command(
        commands,
        "demo",
        run,
        "answer a question about a long document, dense and pruned, side by side",
        example="demo --out demo-output",
    )
    options.add_model(parser)
    parser.add_argument(
        "--out",
        default="demo-output",
        type=options.out_folder,
        metavar="DIR",
        help="for demo.html and demo.png; default demo-output",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the comparison and writes demo.html and demo.png; 0 if both answers are right, else 1."""
    from lazyllm.checkpoints.demo_model import demo_model
    from lazyllm.llm import load
    from lazyllm.pictures.demo import Bar, plot

    llm = load(args.model or demo_model())
    args.out.mkdir(parents=True, exist_ok=True)
    dense, pruned = measure(llm)
    print(report(dense, pruned))
    page = replace(pruned.made.trace.heatmap(), subtitle=f"{summary(dense, pruned)} {pruned.made.pruning}")
    print(f"\nwrote {page.save(args.out / 'demo.html', 'Layers computed for each token of the prompt')}")
    bars = [Bar(one.name, one.ttft, in_play(one.made)) for one in (dense, pruned)]
    try:
        print(f"wrote {plot(bars, args.out / 'demo.png')}")
    except ImportError as error:
        print(f"skipped demo.png: {error}")
    return 0 if dense.right and pruned.right else 1


def measure(llm: LLM) -> tuple[Side, Side]:
    """Runs dense and pruned in turn: whole answers in the first round, first tokens in the others."""
    from lazyllm.pruning import Pruning
    from lazyllm.support.progress import bar

    text = f"{DOCUMENT.read_text(encoding='utf-8')}\n\n{QUESTION}"
    ids = (
        llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        if llm.tokenizer.has_chat_template
        else llm.tokenizer.encode(text)
    )
    prunings = {
        "dense": Pruning(),
        "pruned": Pruning.for_speedup(SPEEDUP, llm.config, len(ids)).recommended(len(ids)),
    }
    answers: dict[str, Generation] = {}
    ttfts: dict[str, list[float]] = {name: [] for name in prunings}
    llm.generate(ids[:WARM_UP_TOKENS], max_new_tokens=1, progress=False)
    with bar(len(prunings) * TIMED_RUNS, "dense and pruned in turn", "run", progress=True) as line:
        for round_ in range(TIMED_RUNS):
            for name, pruning in prunings.items():
                first = round_ == 0
                new = MAX_NEW_TOKENS if first else 1
                made = llm.generate(ids, pruning, max_new_tokens=new, trace=first, progress=False)
                answers.setdefault(name, made)
                ttfts[name].append(made.ttft)
                line.update()
    dense, pruned = (Side(name, answers[name], ttfts[name]) for name in prunings)
    return dense, pruned


def in_play(made: Generation) -> list[int]:
    """The number of prompt tokens in play at each layer of prefill."""
    passes = made.passes
    return [int(count) for count in passes["in_play"][passes["pass_"] == 0]]


def summary(dense: Side, pruned: Side) -> str:
    made = pruned.made
    return (
        f"{QUESTION} {made.text.strip()} First token {dense.ttft / pruned.ttft:.2f} times as fast as dense; "
        f"{made.computed_series[0]:.0%} of the prompt computed by then, {made.computed:.0%} by the end."
    )


def report(dense: Side, pruned: Side) -> str:
    """The comparison as two columns of text."""
    sides = (dense, pruned)
    rows = [
        ("", [side.name for side in sides]),
        ("answer", [side.made.text.strip() for side in sides]),
        ("right", ["yes" if side.right else f"NO (it is {KNOWN_ANSWER})" for side in sides]),
        ("first token", [f"{side.ttft:.2f} s (median of {len(side.ttfts)} runs)" for side in sides]),
        ("speedup", [f"{dense.ttft / side.ttft:.2f} x" for side in sides]),
        (
            "computed",
            [
                f"{side.made.computed_series[0]:.0%} at the first token, {side.made.computed:.0%} by the end"
                for side in sides
            ],
        ),
        ("pruning", [str(side.made.pruning) for side in sides]),
    ]
    n_prompt = len(dense.made.prompt_ids)
    lines = [f"A document of {n_prompt} tokens and a question: {QUESTION}", ""]
    for label, cells in rows:
        columns = [textwrap.wrap(cell, COLUMN_WIDTH - 2) or [""] for cell in cells]
        for i in range(max(map(len, columns))):
            parts = [column[i] if i < len(column) else "" for column in columns]
            lines.append(
                f"{'' if i else label:<{LABEL_WIDTH}}" + "".join(f"{part:<{COLUMN_WIDTH}}" for part in parts)
            )
    return "\n".join(line.rstrip() for line in lines)
