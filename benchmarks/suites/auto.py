"""Suite `auto`: whole answers, pruned against dense, as `min_tokens="auto"` predicts them and as measured."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Contestant, Times, in_turn
from benchmarks.options import Options
from lazyllm.commands.demo import DOCUMENT
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning

SUITE = "auto"
TOKENS, NEW = (128, 256, 512, 1024, 2048), (16, 64)
QUICK_NEW = (4, 8)
SPEEDUP, SPEEDUP_TOKENS = 2.0, 1024
DENSE, PAPER, RECOMMENDED = "dense", "the paper's rule", "recommended"


def auto(options: Options) -> Iterator[Section]:
    place = options.widest
    llm = place.load(options.folder)
    tokens, new = (options.tokens[:1], QUICK_NEW) if options.quick else (TOKENS, NEW)
    lengths = [n for n in tokens if n + max(new) <= llm.config.context]
    paper = Pruning.for_speedup(SPEEDUP, llm.config, min(SPEEDUP_TOKENS, llm.config.context))
    settings = {PAPER: paper, RECOMMENDED: paper.recommended()}
    least = {(name, g): llm.forecast.min_tokens(one, g) for name, one in settings.items() for g in new}
    text = llm.tokenizer.encode(DOCUMENT.read_text(encoding="utf-8"))
    rows, errors, right = [], [], 0
    for n in lengths:
        times = measured(llm, text[:n], {DENSE: Pruning(), **settings}, new, options.rounds)
        for name, setting in settings.items():
            for g in new:
                ratio = times[DENSE, g].median / times[name, g].median
                predicted, pruned = llm.forecast.speedup(setting, n, g), n >= least[name, g]
                errors.append(predicted / ratio - 1)
                right += pruned == (ratio > 1)
                figures: dict[str, Figure] = {
                    DENSE: times[DENSE, g],
                    "pruned": times[name, g],
                    "measured": ratio,
                    "predicted": predicted,
                    "error": errors[-1],
                    "auto runs it": "pruned" if pruned else DENSE,
                    "rightly": "yes" if pruned == (ratio > 1) else "no",
                }
                keys: dict[str, str | int] = {"rule": name, "tokens": n, "new tokens": g, **place.keys}
                rows.append(Row(f"{name}, {n} + {g} tokens", figures, {}, keys))
    yield Section(
        SUITE,
        f"Whole answers, predicted and measured, {options.config.name}, {place}",
        rows,
        (
            f"Of {len(rows)} decisions {right} are right. The error of the predicted speedup is "
            f"{median(map(abs, errors)):.1%} in the median and at most {max(map(abs, errors)):.1%}.",
            "The least prompt that `auto` prunes has "
            + "; ".join(f"{n} tokens for {g} new ones under {name}" for (name, g), n in least.items())
            + ".",
            f"Stages: {paper}. Prompts are the beginning of the demonstration's document; end tokens are "
            "ignored. The profile was measured on the model's own text.",
        ),
    )


def measured(
    llm: LLM, ids: list[int], settings: dict[str, Pruning], new: tuple[int, ...], rounds: int
) -> dict[tuple[str, int], Times]:
    """Seconds to the last token of answers of each length `new`, by setting; the shorter are the beginning of
    the longest."""
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)

    def answers(name: str) -> Contestant:
        def run() -> float:
            begun = time.perf_counter()
            session = llm.session(settings[name])
            logits = session.forward(ids, progress=False)
            for n_new in range(1, max(new) + 1):
                if n_new > 1:
                    logits = session.forward([int(logits.argmax())], generated=True, progress=False)
                if n_new in new:
                    taken[name, n_new].append(time.perf_counter() - begun)
            return taken[name, max(new)][-1]

        return run

    in_turn({name: answers(name) for name in settings}, rounds, f"answers to {len(ids)} tokens")
    return {key: Times(tuple(seconds[1:])) for key, seconds in taken.items()}  # the first warmed up
