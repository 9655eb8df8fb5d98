"""Suite `ops`: single ops on random data, each beside what the machine can do at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from lazyllm._core import Bench
from lazyllm.bench import goals
from lazyllm.bench.ceilings import Ceilings
from lazyllm.bench.goals import Goal
from lazyllm.bench.model_shapes import LARGE, MEDIUM, SMALL, ModelShape
from lazyllm.bench.options import Options
from lazyllm.bench.peers import TORCH, numpy_product, torch_product
from lazyllm.bench.process import Process
from lazyllm.bench.report import Figure, Row, Table, on_threads
from lazyllm.bench.rounds import Contestant, in_turn, repeated

SUITE = "ops"
MANY_ROWS, FEW_ROWS = (512, 1024), (1, 2, 4, 8, 17, 33, 65)
ATTENTION_SHAPES = ((64, 9, 3), (128, 32, 32), (128, 32, 8))  # head_dim, query heads, key heads
ATTENTION_TOKENS, FEW_QUERIES = (2048, 4096), (1, 8, 33, 65)
STAGES, LAYERS = 3, 30  # the prefill that scores and selection are a share of
GIGA = 1e9
OURS, BLAS = "ours", "NumPy's BLAS"
BEST_PEER = "better peer / ours"


def ops(options: Options) -> Iterator[Table]:
    shapes = (SMALL,) if options.quick else (SMALL, MEDIUM, LARGE)
    for threads in options.threads:
        ceilings = Ceilings(threads)
        with ExitStack() as stack:
            products = {BLAS: stack.enter_context(numpy_product(threads))}
            if TORCH in options.peers:
                products[TORCH] = stack.enter_context(torch_product(threads))
            for shape in shapes:
                yield many_rows(options, ceilings, products, shape, threads)
        for shape in shapes:
            yield few_rows(options, ceilings, shape, threads)
        yield attention(options, ceilings, threads)
        yield attention_of_few_rows(options, ceilings, threads)
        yield selection(options, threads)


def bench_of(op: str, n: int, rows: int, cols: int, threads: int) -> Bench:
    return Bench(op, n=n, rows=rows, cols=cols, dtype="bf16", threads=threads)


def turn(bench: Bench) -> Contestant:
    return lambda: repeated(bench.run)


def many_rows(
    options: Options, ceilings: Ceilings, products: dict[str, Process], shape: ModelShape, threads: int
) -> Table:
    rows = []
    for n in MANY_ROWS[:1] if options.quick else MANY_ROWS:
        for name, (op, n_out, n_in) in shape.matrices.items():
            label = f"{name}, {n} x {n_in} to {n_out}"
            bench = bench_of(op, n, n_out, n_in, threads)
            for product in products.values():
                product.call("prepare", n, n_out, n_in)
            contestants = {
                **ceilings.compute,
                OURS: turn(bench),
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
                BEST_PEER: min(ratios.values()),
                "ceiling, GFLOP/s": ceilings.flops(times) / GIGA,
            }
            wanted = {"of ceiling": goals.LINEAR}
            if TORCH in products:  # the goal names both
                wanted[BEST_PEER] = goals.LINEAR_PEERS
            rows.append(Row(label, figures, wanted, {"threads": threads}))
    note = (
        "Weights: ours are bf16 and come from memory each time; the peers' are float32 and stay where their "
        "last run left them. All on the same number of threads."
    )
    return Table(
        SUITE, f"Linear layers of a {shape.name} model, many rows, {on_threads(threads)}", rows, (note,)
    )


def few_rows(options: Options, ceilings: Ceilings, shape: ModelShape, threads: int) -> Table:
    rows = []
    for name, (op, n_out, n_in) in shape.matrices.items():
        for n in FEW_ROWS[:1] if options.quick else FEW_ROWS:
            bench = bench_of(op, n, n_out, n_in, threads)
            label = f"{name}, {n} x {n_in} to {n_out}"
            rows.append(bounded(options, ceilings, bench, label, {"time / bound": goals.FEW_ROWS}))
    return Table(SUITE, f"Linear layers of a {shape.name} model, few rows, {on_threads(threads)}", rows)


def bounded(options: Options, ceilings: Ceilings, bench: Bench, label: str, wanted: dict[str, Goal]) -> Row:
    """An op beside the least time that its bytes and its operations can take."""
    times = in_turn({**ceilings.both, OURS: turn(bench)}, options.rounds, label)
    ours = times[OURS].median
    figures: dict[str, Figure] = {
        OURS: times[OURS],
        "GB/s": bench.bytes / ours / GIGA,
        "GFLOP/s": bench.flops / ours / GIGA,
        "time / bound": ours / ceilings.bound(times, bench.flops, bench.bytes),
        "read ceiling, GB/s": ceilings.bandwidth(times) / GIGA,
    }
    return Row(label, figures, wanted)


def attention_bench(
    n: int, m: int, heads: tuple[int, int, int], threads: int, op: str = "attention"
) -> Bench:
    head_dim, n_heads, n_kv_heads = heads
    return Bench(op, n=n, m=m, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, threads=threads)


def attention(options: Options, ceilings: Ceilings, threads: int) -> Table:
    rows = []
    for heads in ATTENTION_SHAPES[:1] if options.quick else ATTENTION_SHAPES:
        for n in ATTENTION_TOKENS[:1] if options.quick else ATTENTION_TOKENS:
            bench = attention_bench(n, n, heads, threads)
            label = f"{heads[1]} heads of {heads[0]} over {heads[2]}, {n} tokens"
            times = in_turn({**ceilings.compute, OURS: turn(bench)}, options.rounds, f"attention, {label}")
            ours = times[OURS].median
            figures: dict[str, Figure] = {
                OURS: times[OURS],
                "GFLOP/s": bench.flops / ours / GIGA,
                "of ceiling": bench.flops / ours / ceilings.flops(times),
            }
            rows.append(Row(label, figures, {"of ceiling": goals.ATTENTION}, {"threads": threads}))
    return Table(SUITE, f"Causal attention, {on_threads(threads)}", rows)


def attention_of_few_rows(options: Options, ceilings: Ceilings, threads: int) -> Table:
    m = ATTENTION_TOKENS[-1]
    rows = [
        bounded(
            options,
            ceilings,
            attention_bench(n, m, heads, threads),
            f"{heads[1]} heads of {heads[0]} over {heads[2]}, {n} of {m} tokens",
            {},
        )
        for heads in (ATTENTION_SHAPES[:1] if options.quick else ATTENTION_SHAPES)
        for n in (FEW_QUERIES[:1] if options.quick else FEW_QUERIES)
    ]
    note = "Keys and values may lie in the cache from the run before, so a time can be below its bound."
    return Table(SUITE, f"Attention of few rows, {on_threads(threads)}", rows, (note,))


def selection(options: Options, threads: int) -> Table:
    """Scores, selection and gathering beside all products and the attention of one dense layer."""
    m = ATTENTION_TOKENS[-1]
    heads = (SMALL.head_dim, SMALL.n_heads, SMALL.n_kv_heads)
    small = {
        "scores": attention_bench(1, m, heads, threads, "scores"),
        "select": attention_bench(1, m, heads, threads, "select"),
        "gather": Bench("regroup", m=m, cols=SMALL.hidden, threads=threads),
    }
    layer = {"attention": attention_bench(m, m, heads, threads)}
    for name, (op, n_out, n_in) in SMALL.matrices.items():
        layer[name] = bench_of(op, m, n_out, n_in, threads)
    contestants = {name: turn(bench) for name, bench in {**small, **layer}.items()}
    times = in_turn(contestants, options.rounds, f"scores, selection and gathering, {m} tokens")
    dense = sum(times[name].median for name in layer)
    both = sum(times[name].median for name in small)
    rows = [Row(name, {OURS: times[name], "of a dense layer": times[name].median / dense}) for name in small]
    share = {"of a dense layer": both / dense, "of prefill": STAGES * both / (LAYERS * dense)}
    rows.append(Row("together", {**share}, {"of prefill": goals.SELECTION}))
    note = (
        f"A dense layer is {dense * 1e3:.1f} ms: its products and its attention. "
        f"The prefill has {STAGES} stages in {LAYERS} layers."
    )
    return Table(
        SUITE, f"Scores, selection, gathering, 135M model, {m} tokens, {on_threads(threads)}", rows, (note,)
    )
