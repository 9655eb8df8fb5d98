"""Suite `shapes`: dense prefill of models of random weights, a few layers of the sizes that people run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from lazyllm.bench import goals
from lazyllm.bench.ceilings import Ceilings
from lazyllm.bench.model_shapes import LARGE, MEDIUM, SMALL, ModelShape
from lazyllm.bench.options import Options
from lazyllm.bench.peers import TRANSFORMERS, TRANSFORMERS_DTYPES, transformers_peer
from lazyllm.bench.place import Place
from lazyllm.bench.random_model import write_model
from lazyllm.bench.report import Figure, Row, Table
from lazyllm.bench.rounds import Times, in_turn
from lazyllm.bench.scaling import prefill_of
from lazyllm.bench.whole_model import whole_model
from lazyllm.pruning import Pruning

SUITE = "shapes"
OURS, RATIO = "lazyllm", "time / ours"
FEW, ONE = "few layers", "one layer"
LAYERS, QUICK_LAYERS = {MEDIUM: 3, LARGE: 2}, {SMALL: 2}  # beside one: what they differ by is whole layers
TOKENS, VOCAB, CONTEXT = (512, 1024), 1024, 2048
GOALS = {"transformers f32": goals.SHAPES_F32, "transformers bf16": goals.SHAPES_BF16}


def shapes(options: Options) -> Iterator[Table]:
    yield from layers(options) if options.widest.on_cpu else whole_model(options)


def layers(options: Options) -> Iterator[Table]:
    for shape, few in (QUICK_LAYERS if options.quick else LAYERS).items():
        with tempfile.TemporaryDirectory(prefix="lazyllm-bench-") as scratch:
            folders = {FEW: Path(scratch) / FEW, ONE: Path(scratch) / ONE}
            for folder, count in zip(folders.values(), (few, 1), strict=True):
                write_model(folder, replace(shape, n_layers=count), VOCAB, CONTEXT)
            for place in options.places:
                yield measured(options, folders, shape, few, place)


def measured(options: Options, folders: dict[str, Path], shape: ModelShape, few: int, place: Place) -> Table:
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
        f"Random bf16 weights. Time of a layer: what {few} layers take beyond one, since of the last layer's "
        f"output only one row is computed here. Whole model: reckoned from it for {shape.n_layers} layers, "
        f"with a vocabulary of {VOCAB}."
    )
    return Table(SUITE, f"Dense prefill, {shape.name}-shaped, {place}", rows, (note,))


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
    """`least` are the seconds of a layer at the ceiling."""
    mine, ours = (layer_times(times, name, few) for name in (engine, OURS))
    whole = times[named(engine, ONE)].median + (shape.n_layers - 1) * mine.median
    figures: dict[str, Figure] = {
        "time of a layer": mine,
        "of ceiling": least / mine.median,
        "whole model, s": whole,
    }
    if engine != OURS:
        figures[RATIO] = mine.median / ours.median
    wanted = {RATIO: GOALS[engine]} if shape is LARGE and engine in GOALS else {}
    return Row(f"{engine}, {keys['tokens']} tokens", figures, wanted, {"engine": engine, **keys})


def layer_times(times: dict[str, Times], engine: str, few: int) -> Times:
    pairs = zip(times[named(engine, FEW)].seconds, times[named(engine, ONE)].seconds, strict=True)
    return Times(tuple((several - one) / (few - 1) for several, one in pairs))
