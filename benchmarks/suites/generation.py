"""Suite `generation`: whole answers of a fixed length, dense against pruned."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Times, in_turn, timed
from benchmarks.options import Options
from lazyllm.commands.demo import DOCUMENT, QUESTION
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning
from lazyllm.support.json_text import parse_object

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
    yield Section(f"Whole generations, {options.config.name}, {place}", rows, (note,))


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
    with file.open(encoding="utf-8") as lines:
        rows = [parse_object(line, file) for line in islice(lines, items)]
    if not all({"context", "input"} <= row.keys() for row in rows):
        raise ValueError(f"{file}: expected objects with input and context")
    return [f"{row['context']}\n\n{row['input']}" for row in rows]


def prompt_ids(llm: LLM, text: str, limit: int) -> list[int]:
    ids = llm.tokenizer.encode(text)
    return ids if len(ids) <= limit else ids[: limit // 2] + ids[len(ids) - (limit - limit // 2) :]


def measured(options: Options, llm: LLM, prompts: list[list[int]], n_new: int, name: str) -> dict[str, Times]:
    """Seconds to answer all prompts."""
    schedules = [Pruning.for_speedup(SPEEDUP, llm, len(ids)) for ids in prompts]

    def answers(prunings: Sequence[Pruning]) -> None:
        for ids, pruning in zip(prompts, prunings, strict=True):
            answer(llm, ids, pruning, n_new)

    contestants = {DENSE: timed(lambda: answers([Pruning()] * len(prompts))), PRUNED: timed(lambda: answers(schedules))}
    return in_turn(contestants, max(MIN_ROUNDS, options.rounds), f"generations, {name}")


def answer(llm: LLM, ids: list[int], pruning: Pruning, n_new: int) -> None:
    session = llm.session(pruning)
    logits = session.forward(ids, progress=False)
    for _ in range(n_new - 1):
        logits = session.forward([int(logits.argmax())], generated=True, progress=False)
