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
    paper = Pruning.for_speedup(SPEEDUP, llm.config, min(SPEEDUP_TOKENS, llm.config.context))
    settings = {PAPER: paper, RECOMMENDED: paper.recommended()}
    least = {(name, g): llm.forecast.min_tokens(one, g) for name, one in settings.items() for g in new}
    text = llm.tokenizer.encode(DOCUMENT.read_text(encoding="utf-8"))
    errors: dict[tuple[str, int], list[float]] = {key: [] for key in least}
    right = dict.fromkeys(least, 0)
    for n in tokens:
        if n + max(new) > llm.config.context:
            continue
        times = measured(llm, text[:n], {DENSE: Pruning(), **settings}, new, options.rounds)
        rows = []
        for name, g in least:
            ratio = times[DENSE, g].median / times[name, g].median
            predicted, pruned = llm.forecast.speedup(settings[name], n, g), n >= least[name, g]
            errors[name, g].append(predicted / ratio - 1)
            right[name, g] += pruned == (ratio > 1)
            figures: dict[str, Figure] = {
                DENSE: times[DENSE, g],
                "pruned": times[name, g],
                "measured": ratio,
                "predicted": predicted,
                "error": errors[name, g][-1],
                "auto runs it": "pruned" if pruned else DENSE,
                "rightly": "yes" if pruned == (ratio > 1) else "no",
            }
            keys: dict[str, str | int] = {"rule": name, "tokens": n, "new tokens": g, **place.keys}
            rows.append(Row(f"{name}, {g} new tokens", figures, {}, keys))
        yield Section(SUITE, f"Answers to {n} tokens, {options.config.name}, {place}", rows)
    rows = [
        Row(f"{name}, {g} new tokens", summary(least[name, g], right[name, g], errors[name, g]))
        for name, g in least
        if errors[name, g]
    ]
    note = (
        f"Stages: {paper}. Prompts are the beginning of the demonstration's document; end tokens are "
        "ignored. The profile was measured on the model's own text."
    )
    yield Section(SUITE, f"Decisions, {options.config.name}, {place}", rows, (note,))


def summary(least: int, right: int, errors: list[float]) -> dict[str, Figure]:
    sizes = [abs(error) for error in errors]
    return {
        "pruned from": f"{least} tokens on",
        "decided rightly": f"{right} of {len(errors)}",
        "median error": median(sizes),
        "largest error": max(sizes),
    }


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
