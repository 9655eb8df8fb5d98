"""Suite `experts`: layers with experts beside layers without that take as many operations."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.measuring.goals import Goal
from benchmarks.measuring.models import ModelShape, write_model
from benchmarks.measuring.place import Place
from benchmarks.measuring.report import Row, Section
from benchmarks.measuring.rounds import Contestant, in_turn
from benchmarks.options import Options
from benchmarks.suites.decode import steps
from benchmarks.suites.prefill import prefill_of, read
from lazyllm.llm import LLM
from lazyllm.pruning import Pruning

SHAPES = (
    ModelShape("30B-A3B", 2, 2048, 32, 4, 128, 768, n_experts=128, experts_per_token=8),
    ModelShape("8x7B, half as wide", 2, 2048, 16, 4, 128, 7168, n_experts=8, experts_per_token=2),
)
QUICK_SHAPES = (ModelShape("135M", 2, 576, 9, 3, 64, 96, n_experts=16, experts_per_token=4),)
VOCAB, TOKENS, QUICK_TOKENS, STEPS, CONTEXT = 1024, (512, 2048), (64,), 8, 4096
DENSE, EXPERTS, RATE = "without experts", "with experts", "operations per second / without experts"
LEAST = Goal("prefill with experts", 0.85)


def experts(options: Options) -> Iterator[Section]:
    for shape in QUICK_SHAPES if options.quick else SHAPES:
        with tempfile.TemporaryDirectory(prefix="lazyllm-bench-") as scratch:
            width = shape.ffn * shape.experts_per_token
            shapes = {DENSE: replace(shape, ffn=width, n_experts=0), EXPERTS: shape}
            for name, of_name in shapes.items():
                write_model(Path(scratch) / name, of_name, VOCAB, CONTEXT)
            for place in options.places:
                llms = {name: place.load(Path(scratch) / name) for name in shapes}
                chosen = f"{shape.experts_per_token} of {shape.n_experts} experts"
                title = f"Layers of {shape.name} shape, {chosen}, {place}"
                yield Section(title, [*measured(options, llms, place)])


def measured(options: Options, llms: dict[str, LLM], place: Place) -> Iterator[Row]:
    for n in QUICK_TOKENS if options.quick else TOKENS:
        ids = [i % VOCAB for i in range(n)]
        runs = {name: prefill_of(llm, ids) for name, llm in llms.items()}
        yield from compared(options, llms, runs, n, f"prefill of {n} tokens", place)
    runs = {name: steps(read(llm, [0]), [*range(STEPS)]) for name, llm in llms.items()}
    yield from compared(options, llms, runs, 1, "a decode step", place)


def compared(
    options: Options, llms: dict[str, LLM], runs: dict[str, Contestant], n: int, what: str, place: Place
) -> Iterator[Row]:
    times = in_turn(runs, options.rounds, f"{what}, {place}")
    rates = {name: Pruning().flops(llm.config, n) / times[name].median for name, llm in llms.items()}
    for name in llms:
        ratio = {RATE: rates[EXPERTS] / rates[DENSE]} if name == EXPERTS else {}
        goals = {RATE: LEAST} if name == EXPERTS and n > 1 else {}
        keys = {"engine": name, "tokens": n, **place.keys}
        yield Row(f"{what}, {name}", {"time": times[name], **ratio}, goals, keys)
