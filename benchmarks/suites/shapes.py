"""Suite `shapes`: models of 1B and 7B shapes with random weights, a few layers of them on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.measuring import goals
from benchmarks.measuring.ceilings import Ceilings
from benchmarks.measuring.models import LARGE, MEDIUM, SMALL, ModelShape, write_model
from benchmarks.measuring.place import Place
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import Times, in_turn
from benchmarks.options import Options
from benchmarks.peers.engines import OURS, TRANSFORMERS, TRANSFORMERS_DTYPES, transformers_peer
from benchmarks.suites.decode import decode
from benchmarks.suites.prefill import prefill, prefill_of
from benchmarks.suites.pruned import pruned
from lazyllm.pruning import Pruning

SUITE = "shapes"
RATIO = "time / ours"
FEW, ONE = "few layers", "one layer"
LAYERS, QUICK_LAYERS = {MEDIUM: 3, LARGE: 2}, {SMALL: 2}  # of the model that is compared with one layer
TOKENS, VOCAB, CONTEXT = (512, 1024), 1024, 2048
WHOLE_TOKENS, WHOLE_VOCAB, WHOLE_CONTEXT = 3376, 32000, 8192
PREFIX = "lazyllm-bench-"
GOALS = {"transformers f32": goals.SHAPES_F32, "transformers bf16": goals.SHAPES_BF16}


def shapes(options: Options) -> Iterator[Section]:
    yield from layers(options) if options.widest.on_cpu else whole_model(options)


def layers(options: Options) -> Iterator[Section]:
    for shape, few in (QUICK_LAYERS if options.quick else LAYERS).items():
        with tempfile.TemporaryDirectory(prefix=PREFIX) as scratch:
            folders = {FEW: Path(scratch) / FEW, ONE: Path(scratch) / ONE}
            for folder, count in zip(folders.values(), (few, 1), strict=True):
                write_model(folder, replace(shape, n_layers=count), VOCAB, CONTEXT)
            for place in options.places:
                yield measured(options, folders, shape, few, place)


def whole_model(options: Options) -> Iterator[Section]:
    """Prefill, pruning and decoding of a whole model, on a GPU."""
    shape, tokens = (SMALL, options.tokens[0]) if options.quick else (LARGE, WHOLE_TOKENS)
    note = f"Random bf16 weights, a vocabulary of {WHOLE_VOCAB}, the LM head tied to the embedding."
    with tempfile.TemporaryDirectory(prefix=PREFIX) as scratch:
        folder = Path(scratch) / f"{shape.name}-shaped"
        write_model(folder, shape, WHOLE_VOCAB, WHOLE_CONTEXT)
        whole = replace(options, model=str(folder), tokens=(tokens,), context=tokens)
        for suite in (prefill, pruned, decode):
            for section in suite(whole):
                yield replace(section, suite=SUITE, notes=(note, *section.notes))


def measured(
    options: Options, folders: dict[str, Path], shape: ModelShape, few: int, place: Place
) -> Section:
    ceilings = Ceilings(place)
    llms = {size: place.load(folder) for size, folder in folders.items()}
    rows: list[Row] = []
    with ExitStack() as stack:
        peers = {
            (name, size): stack.enter_context(transformers_peer(folder, dtype, place))
            for name, dtype in TRANSFORMERS_DTYPES.items()
            for size, folder in folders.items()
            if TRANSFORMERS in options.peers
        }
        for n in TOKENS[:1] if options.quick else TOKENS:
            ids = np.random.default_rng(n).integers(0, VOCAB, n).tolist()
            contestants = {
                **ceilings.compute,
                **{named(OURS, size): prefill_of(llm, ids) for size, llm in llms.items()},
                **{named(*key): peer.seconds("prefill", ids) for key, peer in peers.items()},
            }
            times = in_turn(contestants, options.rounds, f"{shape.name}-shaped, {n} tokens")
            work = Pruning().flops(llms[FEW].config, n) - Pruning().flops(llms[ONE].config, n)
            engines = dict.fromkeys([OURS, *(name for name, _ in peers)])
            least = work / (few - 1) / ceilings.flops(times)
            rows += [row(shape, times, engine, few, least, {"tokens": n, **place.keys}) for engine in engines]
    note = (
        f"Random bf16 weights. Time of a layer: the difference between {few} layers and one, because lazyllm "
        f"computes only one row of the last layer. Whole model: extrapolated to {shape.n_layers} layers, "
        f"with a vocabulary of {VOCAB}."
    )
    return Section(SUITE, f"Dense prefill, {shape.name}-shaped, {place}", rows, (note,))


def named(engine: str, size: str) -> str:
    return f"{engine}, {size}"


def row(
    shape: ModelShape,
    times: dict[str, Times],
    engine: str,
    few: int,
    least: float,
    keys: dict[str, str | int],
) -> Row:
    """`least`: seconds of a layer at the ceiling."""
    mine, ours = (layer_times(times, name, few) for name in (engine, OURS))
    whole = times[named(engine, ONE)].median + (shape.n_layers - 1) * mine.median
    figures: dict[str, Figure] = {
        "time of a layer": mine,
        "of ceiling": least / mine.median,
        "whole model, s": whole,
    }
    if engine != OURS:
        figures[RATIO] = mine.median / ours.median
    return Row(
        f"{engine}, {keys['tokens']} tokens",
        figures,
        {RATIO: GOALS.get(engine) if shape is LARGE else None},
        {"engine": engine, **keys},
    )


def layer_times(times: dict[str, Times], engine: str, few: int) -> Times:
    pairs = zip(times[named(engine, FEW)].seconds, times[named(engine, ONE)].seconds, strict=True)
    return Times(tuple((several - one) / (few - 1) for several, one in pairs))
