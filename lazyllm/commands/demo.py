"""`lazyllm demo`: one question about a long document, answered dense and pruned in turn."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median

from lazyllm.commands import options
from lazyllm.commands.options import Run

DOCUMENT = Path(__file__).with_name("demo_document.txt")
QUESTION = "In which town were the bells cast?"
KNOWN_ANSWER = "Lindau"
SPEEDUP = 2.0
NEW_TOKENS = (40, 1, 1)  # by round; the last two are run for their times


def demo(parser: argparse.ArgumentParser) -> Run:
    """Answer a question about a long document, dense and pruned, side by side."""
    options.add_model(parser)
    options.add(parser, "--speedup", f"of the first token, by counted work; default {SPEEDUP:g}", "X")
    options.add(parser, "--out", "for demo.html; default demo-output", "DIR", type=options.out_folder)
    return run


def run(args: argparse.Namespace) -> int:
    """Prints the comparison and writes demo.html; 0 if both answers are right, else 1."""
    from lazyllm.support.progress import bar
    from lazyllm.support.tables import Table

    llm, out = options.loaded(args), vars(args).get("out", Path("demo-output"))
    out.mkdir(parents=True, exist_ok=True)
    text, chat = f"{DOCUMENT.read_text(encoding='utf-8')}\n\n{QUESTION}", llm.tokenizer.template is not None
    llm.generate(QUESTION, max_new_tokens=1, progress=False)
    answers = []
    with bar(2 * len(NEW_TOKENS), "dense and pruned in turn", "run", progress=True) as line:
        for n_new in NEW_TOKENS:
            for setting in (None, vars(args).get("speedup", SPEEDUP)):
                answer = llm.generate(text, setting, max_new_tokens=n_new, chat=chat, trace=n_new > 1, progress=False)
                answers.append(answer)
                line.update()
    dense, pruned = answers[:2]
    times = [median(answer.ttft for answer in answers[setting::2]) for setting in (0, 1)]
    right = [KNOWN_ANSWER.casefold() in answer.text.casefold() for answer in (dense, pruned)]
    rows = {
        "right": ["yes" if is_right else f"NO (it is {KNOWN_ANSWER})" for is_right in right],
        f"first token (median of {len(NEW_TOKENS)} runs)": [f"{time:.2f} s" for time in times],
        "speedup": [f"{times[0] / time:.2f} x" for time in times],
        "computed at the first token": [f"{answer.computed_series[0]:.0%}" for answer in (dense, pruned)],
        "computed by the end": [f"{answer.computed:.0%}" for answer in (dense, pruned)],
    }
    print(f"A document of {len(pruned.prompt_ids)} tokens and a question: {QUESTION}\n")
    print(f"dense:  {dense.text.strip()}\npruned: {pruned.text.strip()}\n")
    print(Table("", ["", "dense", "pruned"], [[name, *cells] for name, cells in rows.items()]).text())
    facts = "; ".join(f"{name}: {cells[1]}" for name, cells in rows.items())
    page = replace(pruned.trace.heatmap(), subtitle=f"{QUESTION} {facts}; {pruned.pruning}")
    file = page.save(out / "demo.html", "Layers computed for each token of the prompt")
    print(f"\n{pruned.pruning}\n\nwrote {file}")
    return 0 if all(right) else 1
