"""Suite `ops`: single ops on random data, against the machine's ceilings and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np

from benchmarks.measuring.bench import Bench
from benchmarks.measuring.ceilings import GIGA, Ceilings
from benchmarks.measuring.goals import DRAWING, Goal, goals_of_ops
from benchmarks.measuring.models import LARGE, MEDIUM, SMALL, ModelShape
from benchmarks.measuring.place import Place
from benchmarks.measuring.process import Process
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.measuring.rounds import in_turn, repeated, timed
from benchmarks.options import Options
from benchmarks.peers.engines import TORCH, numpy_product, torch_attention, torch_product
from lazyllm._core import Sampler

MANY_ROWS, FEW_ROWS = (512, 1024), (1, 2, 4, 8, 17, 33, 65)
ATTENTION_SHAPES = ((64, 9, 3), (128, 32, 32), (128, 32, 8))  # head_dim, query heads, key heads
ATTENTION_TOKENS, FEW_QUERIES = (2048, 4096), (1, 8, 33, 65)
WINDOW, WINDOW_HEADS, WINDOW_TOKENS = 512, (256, 4, 1), (8192, 32768)  # of Gemma 3 270M
VOCAB, LARGE_VOCAB = 32000, 151936  # the second is that of Qwen2
DRAWS = {"any token": (1.0, 0), "top_p 0.95": (0.95, 0), "top_k 40": (1.0, 40)}  # top_p, top_k
STAGES, LAYERS = 3, 30  # of the prefill against which scores and selection are counted
OURS, BLAS = "ours", "NumPy's BLAS"
BEST_PEER = "better peer / ours"
PEER = f"{TORCH} / ours"
CPU_NOTE = (
    "lazyllm's weights are bf16 and read from memory in each run; the peers' are one float32 copy, which may "
    "stay in a cache. All use the same number of threads."
)
CUDA_NOTE = "All in bf16. lazyllm's weights are read from memory in each run; torch's may stay in a cache."


def ops(options: Options) -> Iterator[Section]:
    shapes = (SMALL,) if options.quick else (SMALL, MEDIUM, LARGE)
    for place in options.places:
        ceilings = Ceilings(place)
        with ExitStack() as stack:
            products = {BLAS: stack.enter_context(numpy_product(place))} if place.on_cpu else {}
            with_torch, notes = started(torch_product, options, place, stack)
            products |= with_torch
            for shape in shapes:
                ceilings.begin_table()
                yield many_rows(options, ceilings, products, shape, place, notes)
        ceilings.begin_table()
        yield attention(options, ceilings, place)
        for shape in shapes:
            ceilings.begin_table()
            yield few_rows(options, ceilings, shape, place)
        ceilings.begin_table()
        yield attention_of_few_rows(options, ceilings, place)
        ceilings.begin_table()
        yield single_rows(options, ceilings, shapes[-1], place)
        yield attention_in_windows(options, place)
        yield selection(options, place)
    yield drawing(options)


def started(
    make: Callable[[Place], Process], options: Options, place: Place, stack: ExitStack
) -> tuple[dict[str, Process], tuple[str, ...]]:
    """torch's process, closed with the stack, or none and a note why."""
    if TORCH not in options.peers:
        return {}, ()
    try:
        return {TORCH: stack.enter_context(make(place))}, ()
    except RuntimeError as error:
        return {}, (f"**torch is left out: {error}**",)


def bench_of(op: str, n: int, rows: int, cols: int, place: Place) -> Bench:
    return place.bench(op, n=n, rows=rows, cols=cols, dtype="bf16")


def many_rows(
    options: Options,
    ceilings: Ceilings,
    products: dict[str, Process],
    shape: ModelShape,
    place: Place,
    notes: tuple[str, ...],
) -> Section:
    rows, goals = [], goals_of_ops(place.on_cpu)
    judged = {"of ceiling": goals.linear, BEST_PEER: goals.linear_peers}
    for n in MANY_ROWS[:1] if options.quick else MANY_ROWS:
        for name, (op, n_out, n_in) in shape.matrices.items():
            label = f"{name}, {n} x {n_in} to {n_out}"
            for product in products.values():
                product.call("prepare", n, n_out, n_in)
            bench = bench_of(op, n, n_out, n_in, place)
            figures = compared(options, ceilings, place, bench, products, label)
            rows.append(Row(label, figures, judged, place.keys))
    all_notes = (CPU_NOTE if place.on_cpu else CUDA_NOTE, *notes)
    return Section(f"Linear layers of a {shape.name} model, many rows, {place}", rows, all_notes)


def compared(
    options: Options,
    ceilings: Ceilings,
    place: Place,
    bench: Bench,
    peers: dict[str, Process],
    label: str,
) -> dict[str, Figure]:
    """An op against the multiply-add ceiling and the same op of the peers."""
    contestants = {
        **ceilings.compute,
        OURS: place.turn(bench),
        **{name: peer.seconds("run") for name, peer in peers.items()},
    }
    times = in_turn(contestants, options.rounds, label)
    ours, ceiling = times[OURS].median, ceilings.flops(times)
    ratios = {f"{name} / ours": times[name].median / ours for name in peers}
    return {
        OURS: times[OURS],
        "GFLOP/s": bench.flops / ours / GIGA,
        "of ceiling": bench.flops / ours / ceiling,
        **ratios,
        **({BEST_PEER: min(ratios.values())} if len(ratios) > 1 else {}),
        "ceiling, GFLOP/s": ceiling / GIGA,
    }


def few_rows(options: Options, ceilings: Ceilings, shape: ModelShape, place: Place) -> Section:
    rows, goals = [], {"time / bound": goals_of_ops(place.on_cpu).few_rows}
    for name, (op, n_out, n_in) in shape.matrices.items():
        for n in FEW_ROWS[:1] if options.quick else FEW_ROWS:
            bench = bench_of(op, n, n_out, n_in, place)
            label = f"{name}, {n} x {n_in} to {n_out}"
            rows.append(bounded(options, ceilings, place, bench, label, goals))
    return Section(f"Linear layers of a {shape.name} model, few rows, {place}", rows)


def bounded(
    options: Options,
    ceilings: Ceilings,
    place: Place,
    bench: Bench,
    label: str,
    goals: dict[str, Goal | None],
) -> Row:
    """An op against the least time that its bytes and operations can take."""
    times = in_turn({**ceilings.both, OURS: place.turn(bench)}, options.rounds, label)
    ours = times[OURS].median
    figures: dict[str, Figure] = {
        OURS: times[OURS],
        "GB/s": bench.bytes / ours / GIGA,
        "GFLOP/s": bench.flops / ours / GIGA,
        "time / bound": ours / ceilings.bound(times, bench.flops, bench.bytes),
        "read ceiling, GB/s": ceilings.bandwidth(times) / GIGA,
    }
    return Row(label, figures, goals)


def single_rows(options: Options, ceilings: Ceilings, shape: ModelShape, place: Place) -> Section:
    """The ops that only read and write rows, in a decode step and in a prefill."""
    heads = {"n_heads": shape.n_heads, "n_kv_heads": shape.n_kv_heads, "head_dim": shape.head_dim}
    benches = {f"argmax of {VOCAB} logits": place.bench("argmax", rows=VOCAB)}
    for n in (1, *(() if options.quick else MANY_ROWS[-1:])):
        benches |= {
            f"norm, {n} x {shape.hidden}": place.bench("rmsnorm", n=n, cols=shape.hidden),
            f"embedding, {n} x {shape.hidden}": place.bench("embed", n=n, rows=VOCAB, cols=shape.hidden),
            f"RoPE, norms of q and k included, {n} rows": place.bench("rotate", n=n, **heads),
        }
    rows = [bounded(options, ceilings, place, bench, label, {}) for label, bench in benches.items()]
    note = "The bound counts the bytes that are read, not those written; they may still be in a cache."
    return Section(f"Single rows of a {shape.name} model, {place}", rows, (note,))


def attention_bench(
    n: int, m: int, heads: tuple[int, int, int], place: Place, op: str = "attention", window: int = 0
) -> Bench:
    head_dim, n_heads, n_kv_heads = heads
    shape = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "window": window}
    return place.bench(op, n=n, m=m, **shape)


def attention(options: Options, ceilings: Ceilings, place: Place) -> Section:
    rows, goals = [], goals_of_ops(place.on_cpu)
    judged = {"of ceiling": goals.attention, PEER: goals.attention_peer}
    with ExitStack() as stack:
        peers, notes = ({}, ()) if place.on_cpu else started(torch_attention, options, place, stack)
        for heads in ATTENTION_SHAPES[:1] if options.quick else ATTENTION_SHAPES:
            for n in ATTENTION_TOKENS[:1] if options.quick else ATTENTION_TOKENS:
                for peer in peers.values():
                    peer.call("prepare", n, *heads)
                label = f"{heads[1]} heads of {heads[0]} over {heads[2]}, {n} tokens"
                bench = attention_bench(n, n, heads, place)
                figures = compared(options, ceilings, place, bench, peers, label)
                rows.append(Row(label, figures, judged, place.keys))
    return Section(f"Causal attention, {place}", rows, notes)


def attention_of_few_rows(options: Options, ceilings: Ceilings, place: Place) -> Section:
    m = ATTENTION_TOKENS[-1]
    rows = [
        bounded(
            options,
            ceilings,
            place,
            attention_bench(n, m, heads, place),
            f"{heads[1]} heads of {heads[0]} over {heads[2]}, {n} of {m} tokens",
            {},
        )
        for heads in (ATTENTION_SHAPES[:1] if options.quick else ATTENTION_SHAPES)
        for n in (FEW_QUERIES[:1] if options.quick else FEW_QUERIES)
    ]
    note = (
        "Keys and values may still be in a CPU cache from the previous run, so a time can be below its bound."
    )
    return Section(f"Attention of few rows, {place}", rows, (note,))


def attention_in_windows(options: Options, place: Place) -> Section:
    """The share of full causal attention's time that a window takes, against its share of visible pairs."""
    rows, judged = [], {"time / pairs": goals_of_ops(place.on_cpu).window}
    for n in ATTENTION_TOKENS[:1] if options.quick else WINDOW_TOKENS:
        whole, windowed = (attention_bench(n, n, WINDOW_HEADS, place, window=w) for w in (0, WINDOW))
        contestants = {"full": place.turn(whole), "window": place.turn(windowed)}
        times = in_turn(contestants, options.rounds, f"attention in a window of {WINDOW}, {n} tokens")
        time, pairs = times["window"].median / times["full"].median, windowed.flops / whole.flops
        figures: dict[str, Figure] = {
            **times,
            "of its time": time,
            "of its pairs": pairs,
            "time / pairs": time / pairs,
        }
        rows.append(Row(f"{n} tokens", figures, judged, {"tokens": n, **place.keys}))
    heads = f"{WINDOW_HEADS[1]} heads of {WINDOW_HEADS[0]} over {WINDOW_HEADS[2]}"
    return Section(f"Attention in a window of {WINDOW} positions, {heads}, {place}", rows)


def selection(options: Options, place: Place) -> Section:
    """Scores, selection and gathering as a share of the products and attention of a dense layer."""
    m = ATTENTION_TOKENS[-1]
    heads = (SMALL.head_dim, SMALL.n_heads, SMALL.n_kv_heads)
    small = {
        "scores": attention_bench(1, m, heads, place, "scores"),
        "select": attention_bench(1, m, heads, place, "select"),
        "gather": place.bench("regroup", m=m, cols=SMALL.hidden),
    }
    layer = {"attention": attention_bench(m, m, heads, place)}
    for name, (op, n_out, n_in) in SMALL.matrices.items():
        layer[name] = bench_of(op, m, n_out, n_in, place)
    contestants = {name: place.turn(bench) for name, bench in {**small, **layer}.items()}
    times = in_turn(contestants, options.rounds, f"scores, selection and gathering, {m} tokens")
    dense = sum(times[name].median for name in layer)
    both = sum(times[name].median for name in small)
    rows = [Row(name, {OURS: times[name], "of a dense layer": times[name].median / dense}) for name in small]
    share = {"of a dense layer": both / dense, "of prefill": STAGES * both / (LAYERS * dense)}
    rows.append(Row("together", {**share}, {"of prefill": goals_of_ops(place.on_cpu).selection}))
    note = (
        f"A dense layer is {dense * 1e3:.1f} ms: its products and its attention. "
        f"The prefill has {STAGES} stages in {LAYERS} layers."
    )
    return Section(f"Scores, selection, gathering, 135M model, {m} tokens, {place}", rows, (note,))


def drawing(options: Options) -> Section:
    """A draw from the logits of a large vocabulary, against sorting them by comparisons."""
    logits = np.random.default_rng(1).normal(0.0, 3.0, LARGE_VOCAB).astype(np.float32)
    works: dict[str, Callable[[], object]] = {"sort": partial(np.argsort, logits, kind="stable")}
    for name, (top_p, top_k) in DRAWS.items():
        works[name] = partial(Sampler(0.8, top_p, top_k, 1).sample, logits)
    contestants = {name: partial(repeated, timed(work)) for name, work in works.items()}
    times = in_turn(contestants, options.rounds, f"a draw from {LARGE_VOCAB} logits")
    sort = times.pop("sort")
    judged = {"sort / ours": DRAWING}
    rows = [
        Row(name, {OURS: draw, "NumPy's sort": sort, "sort / ours": sort.median / draw.median}, judged)
        for name, draw in times.items()
    ]
    return Section(f"A draw from {LARGE_VOCAB} logits, 1 thread", rows)
