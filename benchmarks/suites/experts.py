"""Suite `experts`: layers with experts beside layers without that take as many operations."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.measuring.goals import Goal
from benchmarks.measuring.models import ModelShape, write_model
from benchmarks.measuring.place import Place
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Contestant, in_turn, timed
from benchmarks.options import Options
from benchmarks.suites.prefill import prefill_of, read
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning

SHAPES = (
    ModelShape("30B-A3B", 2, 2048, 32, 4, 128, 768, n_experts=128, experts_per_token=8),
    ModelShape("8x7B, half as wide", 2, 2048, 16, 4, 128, 7168, n_experts=8, experts_per_token=2),
)
QUICK_SHAPES = (ModelShape("135M", 2, 576, 9, 3, 64, 96, n_experts=16, experts_per_token=4),)
VOCAB, TOKENS, QUICK_TOKENS, STEPS = 1024, (512, 2048), (64,), 8
DENSE, EXPERTS, RATE = "without experts", "with experts", "operations per second / without experts"
LEAST = Goal("prefill with experts", 0.85)


def experts(options: Options) -> Iterator[Section]:
    for shape in QUICK_SHAPES if options.quick else SHAPES:
        with tempfile.TemporaryDirectory(prefix="lazyllm-bench-") as scratch:
            width = shape.ffn * shape.experts_per_token
            shapes = {DENSE: replace(shape, ffn=width, n_experts=0), EXPERTS: shape}
            for name, of_name in shapes.items():
                write_model(Path(scratch) / name, of_name, VOCAB, max(TOKENS) + STEPS)
            for place in options.places:
                llms = {name: place.load(Path(scratch) / name) for name in shapes}
                chosen = f"{shape.experts_per_token} of {shape.n_experts} experts"
                title = f"Layers of {shape.name} shape, {chosen}, {place}"
                yield Section(title, measured(options, llms, place))


def measured(options: Options, llms: dict[str, LLM], place: Place) -> list[Row]:
    rows = []
    for n in QUICK_TOKENS if options.quick else TOKENS:
        runs = {name: prefill_of(llm, [i % VOCAB for i in range(n)]) for name, llm in llms.items()}
        rows += compared(options, llms, runs, n, f"prefill of {n} tokens", place)
    runs = {name: steps_of(llm) for name, llm in llms.items()}
    return rows + compared(options, llms, runs, 1, f"{STEPS} decode steps", place)


def steps_of(llm: LLM) -> Contestant:
    session = read(llm, [0])

    def run() -> None:
        session.truncate(1)
        for token in range(STEPS):
            session.forward([token], generated=True, progress=False)

    return timed(run)


def compared(
    options: Options, llms: dict[str, LLM], runs: dict[str, Contestant], n: int, what: str, place: Place
) -> list[Row]:
    times = in_turn(runs, options.rounds, f"{what}, {place}")
    rates = {name: Pruning().flops(llm.config, n) / times[name].median for name, llm in llms.items()}
    rows = []
    for name in llms:
        figures: dict[str, Figure] = {"time": times[name]}
        if name == EXPERTS:
            figures[RATE] = rates[EXPERTS] / rates[DENSE]
        goals = {RATE: LEAST} if name == EXPERTS and n > 1 else {}
        rows.append(Row(f"{what}, {name}", figures, goals, {"engine": name, "tokens": n, **place.keys}))
    return rows
