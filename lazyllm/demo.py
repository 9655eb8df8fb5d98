"""The demonstration: one question about a long document, answered dense and pruned, side by side."""

from __future__ import annotations

import statistics
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.generation import Generation
from lazyllm.gguf import demo_model
from lazyllm.llm import LLM, load
from lazyllm.picture import new_figure
from lazyllm.progress import bar
from lazyllm.pruning import Pruning

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCUMENT = Path(__file__).with_name("demo_document.txt")
QUESTION = "In which town were the bells cast?"
KNOWN_ANSWER = "Lindau"
SPEEDUP = 2.0  # of prefill, by counted work
MAX_NEW_TOKENS = 40
TIMED_RUNS = 3
WARM_UP_TOKENS = 64
LABEL_WIDTH, COLUMN_WIDTH = 13, 40


@dataclass(frozen=True)
class Side:
    """One way of answering, and the first-token times of its runs."""

    name: str
    made: Generation
    ttfts: list[float]

    @property
    def ttft(self) -> float:
        return statistics.median(self.ttfts)

    @property
    def right(self) -> bool:
        return KNOWN_ANSWER.casefold() in self.made.text.casefold()


def run(model: str | None, out: Path) -> int:
    """Prints the comparison and writes demo.html and demo.png; 0 if both answers are right, else 1."""
    llm = load(model or demo_model())
    out.mkdir(parents=True, exist_ok=True)
    dense, pruned = measure(llm)
    print(report(dense, pruned))
    trace = pruned.made.trace
    if trace is not None:
        page = replace(trace.heatmap(), subtitle=f"{summary(dense, pruned)} {pruned.made.pruning}")
        print(f"\nwrote {page.save(out / 'demo.html', 'What the pruned run read, and how deeply')}")
    try:
        print(f"wrote {plot(dense, pruned, out / 'demo.png')}")
    except ImportError as error:
        print(f"skipped demo.png: {error}")
    return 0 if dense.right and pruned.right else 1


def measure(llm: LLM) -> tuple[Side, Side]:
    """Dense and pruned in turn: whole answers in the first round, first tokens in the others."""
    chat = llm.tokenizer.has_chat_template
    text = f"{DOCUMENT.read_text(encoding='utf-8')}\n\n{QUESTION}"
    ids = (
        llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        if chat
        else llm.tokenizer.encode(text)
    )
    prunings = {
        "dense": Pruning(),
        "pruned": Pruning.for_speedup(SPEEDUP, llm.config, len(ids)).recommended(),
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


# ---- the plot ------------------------------------------------------------------------------------

COLOURS = {"dense": "#b8c0cc", "pruned": "#0b4a8f"}


def plot(dense: Side, pruned: Side, path: Path) -> Path:
    """First-token times, and the tokens in play in each layer of prefill."""
    figure = new_figure(10, 4)
    times, tokens = figure.subplots(1, 2, width_ratios=(1, 1.6))
    plot_times(times, dense, pruned)
    for side in (dense, pruned):
        plot_tokens(tokens, side)
    tokens.set(
        xlabel="layer", ylabel="prompt tokens in play", title="Prefill, layer by layer", ylim=(0, None)
    )
    tokens.legend(loc="upper right", framealpha=1.0)
    for axes in (times, tokens):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return path


def plot_times(axes: Axes, dense: Side, pruned: Side) -> None:
    sides = (dense, pruned)
    bars = axes.bar(
        [s.name for s in sides], [s.ttft for s in sides], color=[COLOURS[s.name] for s in sides], width=0.6
    )
    axes.bar_label(bars, [f"{s.ttft:.2f} s\n{dense.ttft / s.ttft:.2f} x" for s in sides], padding=3)
    axes.set(ylabel="seconds (median)", title="Time to first token", ylim=(0, 1.25 * dense.ttft))


def plot_tokens(axes: Axes, side: Side) -> None:
    passes = side.made.passes
    in_play = passes["in_play"][passes["pass_"] == 0]
    colour = COLOURS[side.name]
    axes.stairs(in_play, np.arange(in_play.size + 1), color=colour, label=side.name, fill=True)
