"""`lazyllm demo`: one question about a long document, answered dense and pruned in turn."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lazyllm.commands import options
from lazyllm.commands.options import Run

if TYPE_CHECKING:
    from lazyllm.generation import Generation
    from lazyllm.llm import LLM

DOCUMENT = Path(__file__).with_name("demo_document.txt")
QUESTION = "In which town were the bells cast?"
KNOWN_ANSWER = "Lindau"
SPEEDUP = 2.0
MAX_NEW_TOKENS = 40
TIMED_RUNS = 3


def demo(parser: argparse.ArgumentParser) -> Run:
    """Answer a question about a long document, dense and pruned, side by side."""
    options.add_model(parser)
    options.add(parser, "--speedup", f"of the first token, by counted work; default {SPEEDUP:g}", "X")
    options.add(parser, "--out", "for demo.html; default demo-output", "DIR", type=options.out_folder)
    return run


def run(args: argparse.Namespace) -> int:
    """Prints the comparison and writes demo.html; 0 if both answers are right, else 1."""
    from lazyllm.support.tables import Table

    llm, out = options.loaded(args), vars(args).get("out", Path("demo-output"))
    out.mkdir(parents=True, exist_ok=True)
    answers, ttfts = measure(llm, vars(args).get("speedup", SPEEDUP))
    pruned = answers["pruned"]
    right = [KNOWN_ANSWER.casefold() in answer.text.casefold() for answer in answers.values()]
    rows = {
        "answer": [answer.text.strip() for answer in answers.values()],
        "right": ["yes" if is_right else f"NO (it is {KNOWN_ANSWER})" for is_right in right],
        f"first token (median of {TIMED_RUNS} runs)": [f"{ttft:.2f} s" for ttft in ttfts.values()],
        "speedup": [f"{ttfts['dense'] / ttft:.2f} x" for ttft in ttfts.values()],
        "computed at the first token": [f"{answer.computed_series[0]:.0%}" for answer in answers.values()],
        "computed by the end": [f"{answer.computed:.0%}" for answer in answers.values()],
    }
    print(f"A document of {len(pruned.prompt_ids)} tokens and a question: {QUESTION}\n")
    print(Table("", ["", *answers], [[name, *cells] for name, cells in rows.items()]).text())
    facts = "; ".join(f"{name}: {cells[1]}" for name, cells in rows.items())
    page = replace(pruned.trace.heatmap(), subtitle=f"{QUESTION} {facts}; {pruned.pruning}")
    file = page.save(out / "demo.html", "Layers computed for each token of the prompt")
    print(f"\n{pruned.pruning}\n\nwrote {file}")
    return 0 if all(right) else 1


def measure(llm: LLM, speedup: float) -> tuple[dict[str, Generation], dict[str, float]]:
    """By setting, run in turn: the answer of the first round, and the median time to first token of all."""
    from lazyllm.support.progress import bar

    text, chat = f"{DOCUMENT.read_text(encoding='utf-8')}\n\n{QUESTION}", llm.tokenizer.template is not None
    answers: dict[str, Generation] = {}
    ttfts: dict[str, list[float]] = {"dense": [], "pruned": []}
    llm.generate(QUESTION, max_new_tokens=1, progress=False)
    with bar(len(ttfts) * TIMED_RUNS, "dense and pruned in turn", "run", progress=True) as line:
        for n_new in [MAX_NEW_TOKENS] + [1] * (TIMED_RUNS - 1):
            for name, times in ttfts.items():
                pruning = None if name == "dense" else speedup
                answer = llm.generate(
                    text, pruning, max_new_tokens=n_new, chat=chat, trace=name not in answers, progress=False
                )
                answers.setdefault(name, answer)
                times.append(answer.ttft)
                line.update()
    return answers, {name: median(times) for name, times in ttfts.items()}
