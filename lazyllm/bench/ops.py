"""Suite `ops`: single ops on random data, each beside what the machine can do at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from lazyllm._core import Bench
from lazyllm.bench.ceilings import Ceilings
from lazyllm.bench.goals import Goal, of_ops, wanted
from lazyllm.bench.model_shapes import LARGE, MEDIUM, SMALL, ModelShape
from lazyllm.bench.options import Options
from lazyllm.bench.peers import TORCH, numpy_product, torch_attention, torch_product
from lazyllm.bench.place import Place
from lazyllm.bench.process import Process
from lazyllm.bench.report import Figure, Row, Table
from lazyllm.bench.rounds import in_turn

SUITE = "ops"
MANY_ROWS, FEW_ROWS = (512, 1024), (1, 2, 4, 8, 17, 33, 65)
ATTENTION_SHAPES = ((64, 9, 3), (128, 32, 32), (128, 32, 8))  # head_dim, query heads, key heads
ATTENTION_TOKENS, FEW_QUERIES = (2048, 4096), (1, 8, 33, 65)
STAGES, LAYERS = 3, 30  # the prefill that scores and selection are a share of
GIGA = 1e9
OURS, BLAS = "ours", "NumPy's BLAS"
BEST_PEER = "better peer / ours"
PEER = f"{TORCH} / ours"
CPU_NOTE = (
    "Weights: ours are bf16 and come from memory each time; the peers' are float32 and stay where their "
    "last run left them. All on the same number of threads."
)
CUDA_NOTE = (
    "All in bf16. Weights: ours come from memory each time; torch's stay where its last run left them."
)


def ops(options: Options) -> Iterator[Table]:
    shapes = (SMALL,) if options.quick else (SMALL, MEDIUM, LARGE)
    for place in options.places:
        ceilings = Ceilings(place)
        with ExitStack() as stack:
            products = {BLAS: stack.enter_context(numpy_product(place))} if place.on_cpu else {}
            with_torch, notes = started(torch_product, options, place, stack)
            products |= with_torch
            for shape in shapes:
                yield many_rows(options, ceilings, products, shape, place, notes)
        for shape in shapes:
            yield few_rows(options, ceilings, shape, place)
        yield attention(options, ceilings, place)
        yield attention_of_few_rows(options, ceilings, place)
        yield selection(options, place)


def started(
    make: Callable[[Place], Process], options: Options, place: Place, stack: ExitStack
) -> tuple[dict[str, Process], tuple[str, ...]]:
    """torch's process for as long as the stack lasts, or none and why."""
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
) -> Table:
    rows, goals = [], of_ops(place.on_cpu)
    for n in MANY_ROWS[:1] if options.quick else MANY_ROWS:
        for name, (op, n_out, n_in) in shape.matrices.items():
            label = f"{name}, {n} x {n_in} to {n_out}"
            bench = bench_of(op, n, n_out, n_in, place)
            for product in products.values():
                product.call("prepare", n, n_out, n_in)
            contestants = {
                **ceilings.compute,
                OURS: place.turn(bench),
                **{peer: product.seconds("run") for peer, product in products.items()},
            }
            times = in_turn(contestants, options.rounds, f"{shape.name} {label}")
            ours = times[OURS].median
            ratios = {peer: times[peer].median / ours for peer in products}
            figures: dict[str, Figure] = {
                OURS: times[OURS],
                "GFLOP/s": bench.flops / ours / GIGA,
                "of ceiling": bench.flops / ours / ceilings.flops(times),
                **{f"{peer} / ours": ratio for peer, ratio in ratios.items()},
                **({BEST_PEER: min(ratios.values())} if ratios else {}),
                "ceiling, GFLOP/s": ceilings.flops(times) / GIGA,
            }
            pair: dict[str, Goal | None] = {"of ceiling": goals.linear}
            if TORCH in products:  # the goal names both
                pair[BEST_PEER] = goals.linear_peers
            rows.append(Row(label, figures, wanted(pair), place.keys))
    all_notes = (CPU_NOTE if place.on_cpu else CUDA_NOTE, *notes)
    return Table(SUITE, f"Linear layers of a {shape.name} model, many rows, {place}", rows, all_notes)


def few_rows(options: Options, ceilings: Ceilings, shape: ModelShape, place: Place) -> Table:
    rows, goals = [], wanted({"time / bound": of_ops(place.on_cpu).few_rows})
    for name, (op, n_out, n_in) in shape.matrices.items():
        for n in FEW_ROWS[:1] if options.quick else FEW_ROWS:
            bench = bench_of(op, n, n_out, n_in, place)
            label = f"{name}, {n} x {n_in} to {n_out}"
            rows.append(bounded(options, ceilings, place, bench, label, goals))
    return Table(SUITE, f"Linear layers of a {shape.name} model, few rows, {place}", rows)


def bounded(
    options: Options, ceilings: Ceilings, place: Place, bench: Bench, label: str, goals: dict[str, Goal]
) -> Row:
    """An op beside the least time that its bytes and its operations can take."""
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


def attention_bench(
    n: int, m: int, heads: tuple[int, int, int], place: Place, op: str = "attention"
) -> Bench:
    head_dim, n_heads, n_kv_heads = heads
    return place.bench(op, n=n, m=m, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)


def attention(options: Options, ceilings: Ceilings, place: Place) -> Table:
    rows, goals = [], of_ops(place.on_cpu)
    pair = wanted({"of ceiling": goals.attention, PEER: goals.attention_peer})
    with ExitStack() as stack:
        peers, notes = ({}, ()) if place.on_cpu else started(torch_attention, options, place, stack)
        for heads in ATTENTION_SHAPES[:1] if options.quick else ATTENTION_SHAPES:
            for n in ATTENTION_TOKENS[:1] if options.quick else ATTENTION_TOKENS:
                bench = attention_bench(n, n, heads, place)
                label = f"{heads[1]} heads of {heads[0]} over {heads[2]}, {n} tokens"
                for peer in peers.values():
                    peer.call("prepare", n, *heads)
                contestants = {
                    **ceilings.compute,
                    OURS: place.turn(bench),
                    **{name: peer.seconds("run") for name, peer in peers.items()},
                }
                times = in_turn(contestants, options.rounds, f"attention, {label}")
                ours = times[OURS].median
                figures: dict[str, Figure] = {
                    OURS: times[OURS],
                    "GFLOP/s": bench.flops / ours / GIGA,
                    "of ceiling": bench.flops / ours / ceilings.flops(times),
                    **{f"{name} / ours": times[name].median / ours for name in peers},
                }
                rows.append(Row(label, figures, pair, place.keys))
    return Table(SUITE, f"Causal attention, {place}", rows, notes)


def attention_of_few_rows(options: Options, ceilings: Ceilings, place: Place) -> Table:
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
    note = "Keys and values may lie in the cache from the run before, so a time can be below its bound."
    return Table(SUITE, f"Attention of few rows, {place}", rows, (note,))


def selection(options: Options, place: Place) -> Table:
    """Scores, selection and gathering beside all products and the attention of one dense layer."""
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
    rows.append(Row("together", {**share}, wanted({"of prefill": of_ops(place.on_cpu).selection})))
    note = (
        f"A dense layer is {dense * 1e3:.1f} ms: its products and its attention. "
        f"The prefill has {STAGES} stages in {LAYERS} layers."
    )
    return Table(SUITE, f"Scores, selection, gathering, 135M model, {m} tokens, {place}", rows, (note,))
