"""Suite `generation`: whole answers of a fixed length, dense against pruned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Contestant, Times, in_turn, timed
from benchmarks.options import Options
from lazyllm.commands.demo import DOCUMENT, QUESTION
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning

SUITE = "generation"
NEW_TOKENS, QUICK_NEW_TOKENS = 128, 8
PROMPT_LIMIT = 3500  # tokens; the middle of a longer prompt is cut out
MIN_ROUNDS = 2
SPEEDUP = 2.0
DENSE, PRUNED, RATIO = "dense", "pruned", "dense / pruned"


def generation(options: Options) -> Iterator[Section]:
    place = options.widest
    llm = place.load(options.folder)
    n_new = QUICK_NEW_TOKENS if options.quick else NEW_TOKENS
    limit = min(options.tokens[0] if options.quick else PROMPT_LIMIT, llm.config.context - n_new)
    rows = []
    for name, texts in data_sets(options).items():
        prompts = [prompt_ids(llm, text, limit) for text in texts]
        times = measured(options, llm, prompts, n_new, name)
        figures: dict[str, Figure] = {
            "prompts": float(len(prompts)),
            "mean tokens": sum(map(len, prompts)) / len(prompts),
            **times,
            RATIO: times[DENSE].median / times[PRUNED].median,
        }
        rows.append(Row(name, figures, {RATIO: options.goals(place).generation}, place.keys))
    note = (
        f"{n_new} new tokens, end tokens ignored. Pruning for a counted speedup of {SPEEDUP:g}, also in "
        f"decode steps. Prompts of more than {limit} tokens lose their middle."
    )
    yield Section(SUITE, f"Whole generations, {options.config.name}, {place}", rows, (note,))


def data_sets(options: Options) -> dict[str, list[str]]:
    """Prompts by data set: one data set per jsonl file, or the demonstration's document and question."""
    if options.data is None:
        return {"demonstration": [f"{DOCUMENT.read_text(encoding='utf-8')}\n\n{QUESTION}"]}
    files = sorted(options.data.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{options.data} holds no .jsonl file")
    return {file.stem: prompts_of(file, options.items) for file in files}


def prompts_of(file: Path, items: int) -> list[str]:
    """Context and input of the first items."""
    texts: list[str] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if len(texts) == items:
                break
            try:
                item = json.loads(line)
                texts.append(f"{item['context']}\n\n{item['input']}")
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{file}, line {number}: expected an object with input and context: {error}"
                ) from None
    if not texts:
        raise ValueError(f"{file} is empty")
    return texts


def prompt_ids(llm: LLM, text: str, limit: int) -> list[int]:
    ids = llm.tokenizer.encode(text)
    return ids if len(ids) <= limit else ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]


def measured(options: Options, llm: LLM, prompts: list[list[int]], n_new: int, name: str) -> dict[str, Times]:
    """Seconds to answer all prompts."""

    def answers(pruning: bool) -> Contestant:
        schedules = [Pruning.for_speedup(SPEEDUP, llm, len(ids)) if pruning else Pruning() for ids in prompts]
        pairs = list(zip(prompts, schedules, strict=True))

        def run() -> None:
            for ids, schedule in pairs:
                answer(llm, ids, schedule, n_new)

        return timed(run)

    contestants = {DENSE: answers(pruning=False), PRUNED: answers(pruning=True)}
    return in_turn(contestants, max(MIN_ROUNDS, options.rounds), f"generations, {name}")


def answer(llm: LLM, ids: list[int], pruning: Pruning, n_new: int) -> None:
    session = llm.session(pruning)
    logits = session.forward(ids, progress=False)
    for _ in range(n_new - 1):
        logits = session.forward([int(logits.argmax())], generated=True, progress=False)
