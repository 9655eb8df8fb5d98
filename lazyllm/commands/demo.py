"""`lazyllm demo`: one question about a long document, answered dense and pruned in turn."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lazyllm.commands import options

if TYPE_CHECKING:
    from lazyllm.generation import Generation
    from lazyllm.llm import LLM

SUMMARY = "answer a question about a long document, dense and pruned, side by side"
EXAMPLE = "--out demo-output"
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
    answer: Generation
    ttfts: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return median(self.ttfts)

    @property
    def right(self) -> bool:
        return KNOWN_ANSWER.casefold() in self.answer.text.casefold()

    @property
    def in_play(self) -> list[int]:
        """The number of prompt tokens in play at each layer of prefill."""
        passes = self.answer.passes
        return [int(count) for count in passes["in_play"][passes["pass_"] == 0]]

    @property
    def computed(self) -> str:
        answer = self.answer
        return f"{answer.computed_series[0]:.0%} at the first token, {answer.computed:.0%} by the end"


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add(
        parser, "--out", "for demo.html and demo.png; default demo-output", "DIR", type=options.out_folder
    )


def run(args: argparse.Namespace) -> int:
    """Prints the comparison and writes demo.html and demo.png; 0 if both answers are right, else 1."""
    from lazyllm.pictures.demo import Bar, plot

    llm, out = options.loaded(args), vars(args).get("out", Path("demo-output"))
    out.mkdir(parents=True, exist_ok=True)
    dense, pruned = measure(llm)
    print(report(dense, pruned))
    subtitle = (
        f"{QUESTION} {pruned.answer.text.strip()} First token {dense.ttft / pruned.ttft:.2f} times as fast "
        f"as dense; computed of the prompt: {pruned.computed}. {pruned.answer.pruning}"
    )
    page = replace(pruned.answer.trace.heatmap(), subtitle=subtitle)
    print(f"\nwrote {page.save(out / 'demo.html', 'Layers computed for each token of the prompt')}")
    bars = [Bar(side.name, side.ttft, side.in_play) for side in (dense, pruned)]
    try:
        print(f"wrote {plot(bars, out / 'demo.png')}")
    except ImportError as error:
        print(f"skipped demo.png: {error}")
    return 0 if dense.right and pruned.right else 1


def measure(llm: LLM) -> list[Side]:
    """Dense and pruned, run in turn: whole answers in the first round, first tokens in the others."""
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
    sides: dict[str, Side] = {}
    llm.generate(ids[:WARM_UP_TOKENS], max_new_tokens=1, progress=False)
    with bar(len(prunings) * TIMED_RUNS, "dense and pruned in turn", "run", progress=True) as line:
        for first in [True] + [False] * (TIMED_RUNS - 1):
            for name, pruning in prunings.items():
                new = MAX_NEW_TOKENS if first else 1
                answer = llm.generate(ids, pruning, max_new_tokens=new, trace=first, progress=False)
                sides.setdefault(name, Side(name, answer)).ttfts.append(answer.ttft)
                line.update()
    return list(sides.values())


def report(dense: Side, pruned: Side) -> str:
    """The comparison as two columns of text."""
    sides = (dense, pruned)
    rows = {
        "": [side.name for side in sides],
        "answer": [side.answer.text.strip() for side in sides],
        "right": ["yes" if side.right else f"NO (it is {KNOWN_ANSWER})" for side in sides],
        "first token": [f"{side.ttft:.2f} s (median of {len(side.ttfts)} runs)" for side in sides],
        "speedup": [f"{dense.ttft / side.ttft:.2f} x" for side in sides],
        "computed": [side.computed for side in sides],
        "pruning": [str(side.answer.pruning) for side in sides],
    }
    lines = [f"A document of {len(dense.answer.prompt_ids)} tokens and a question: {QUESTION}", ""]
    for label, cells in rows.items():
        columns = [textwrap.wrap(cell, COLUMN_WIDTH - 2) or [""] for cell in cells]
        for i in range(max(map(len, columns))):
            parts = [column[i] if i < len(column) else "" for column in columns]
            left = "" if i else label
            lines.append(f"{left:<{LABEL_WIDTH}}" + "".join(f"{part:<{COLUMN_WIDTH}}" for part in parts))
    return "\n".join(line.rstrip() for line in lines)
