"""Suite `ops`: single ops on random data, against the machine's ceilings and other libraries."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.measuring.bench import Bench
from benchmarks.measuring.ceilings import GIGA, Ceilings
from benchmarks.measuring.goals import DRAWING, Goal, Goals, goals_of_ops
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
    shapes = options.first(SMALL, MEDIUM, LARGE)
    for place in options.places:
        at = Comparison(options, place, Ceilings(place))
        with ExitStack() as stack:
            products = {BLAS: stack.enter_context(numpy_product(place))} if place.on_cpu else {}
            with_torch, notes = at.started(torch_product, stack)
            for shape in shapes:
                yield many_rows(at, products | with_torch, shape, notes)
        yield attention(at)
        for shape in shapes:
            yield few_rows(at, shape)
        yield attention_of_few_rows(at)
        yield single_rows(at, shapes[-1])
        yield attention_in_windows(at)
        yield selection(at)
    yield drawing(options)


@dataclass(frozen=True)
class Comparison:
    """Compares ops at a place with its ceilings and with peers."""

    options: Options
    place: Place
    ceilings: Ceilings

    @property
    def goals(self) -> Goals:
        return goals_of_ops(self.place.on_cpu)

    def started(self, make: Callable[[Place], Process], stack: ExitStack) -> tuple[dict[str, Process], tuple[str, ...]]:
        """torch's process, closed with the stack, or none and a note why."""
        if TORCH not in self.options.peers:
            return {}, ()
        try:
            return {TORCH: stack.enter_context(make(self.place))}, ()
        except RuntimeError as error:
            return {}, (f"**torch is left out: {error}**",)

    def linear(self, op: str, n: int, rows: int, cols: int) -> Bench:
        return self.place.bench(op, n=n, rows=rows, cols=cols, dtype="bf16")

    def attention(self, n: int, m: int, heads: tuple[int, int, int], op: str = "attention", window: int = 0) -> Bench:
        head_dim, n_heads, n_kv_heads = heads
        shape = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "window": window}
        return self.place.bench(op, n=n, m=m, **shape)

    def with_peers(
        self, bench: Bench, peers: Mapping[str, Process], label: str, judged: Mapping[str, Goal | None]
    ) -> Row:
        """An op against the multiply-add ceiling and the same op of the peers."""
        turns = {name: peer.seconds("run") for name, peer in peers.items()}
        contestants = {**self.ceilings.compute, OURS: self.place.turn(bench), **turns}
        times = in_turn(contestants, self.options.rounds, label)
        ours, ceiling = times[OURS].median, self.ceilings.flops(times)
        ratios = {f"{name} / ours": times[name].median / ours for name in peers}
        figures: dict[str, Figure] = {
            OURS: times[OURS],
            "GFLOP/s": bench.flops / ours / GIGA,
            "of ceiling": bench.flops / ours / ceiling,
            **ratios,
            **({BEST_PEER: min(ratios.values())} if len(ratios) > 1 else {}),
            "ceiling, GFLOP/s": ceiling / GIGA,
        }
        return Row(label, figures, judged, self.place.keys)

    def with_bound(self, bench: Bench, label: str, goal: Goal | None = None) -> Row:
        """An op against the least time that its bytes and operations can take."""
        contestants = {**self.ceilings.both, OURS: self.place.turn(bench)}
        times = in_turn(contestants, self.options.rounds, label)
        ours = times[OURS].median
        figures: dict[str, Figure] = {
            OURS: times[OURS],
            "GB/s": bench.bytes / ours / GIGA,
            "GFLOP/s": bench.flops / ours / GIGA,
            "time / bound": ours / self.ceilings.bound(times, bench.flops, bench.bytes),
            "read ceiling, GB/s": self.ceilings.bandwidth(times) / GIGA,
        }
        return Row(label, figures, {"time / bound": goal})


def many_rows(at: Comparison, products: Mapping[str, Process], shape: ModelShape, notes: tuple[str, ...]) -> Section:
    rows, judged = [], {"of ceiling": at.goals.linear, BEST_PEER: at.goals.linear_peers}
    at.ceilings.begin_table()
    for n in at.options.first(*MANY_ROWS):
        for name, (op, n_out, n_in) in shape.matrices.items():
            for product in products.values():
                product.call("prepare", n, n_out, n_in)
            label = f"{name}, {n} x {n_in} to {n_out}"
            rows.append(at.with_peers(at.linear(op, n, n_out, n_in), products, label, judged))
    all_notes = (CPU_NOTE if at.place.on_cpu else CUDA_NOTE, *notes)
    return Section(f"Linear layers of a {shape.name} model, many rows, {at.place}", rows, all_notes)


def few_rows(at: Comparison, shape: ModelShape) -> Section:
    at.ceilings.begin_table()
    rows = [
        at.with_bound(at.linear(op, n, n_out, n_in), f"{name}, {n} x {n_in} to {n_out}", at.goals.few_rows)
        for name, (op, n_out, n_in) in shape.matrices.items()
        for n in at.options.first(*FEW_ROWS)
    ]
    return Section(f"Linear layers of a {shape.name} model, few rows, {at.place}", rows)


def single_rows(at: Comparison, shape: ModelShape) -> Section:
    """The ops that only read and write rows, in a decode step and in a prefill."""
    at.ceilings.begin_table()
    heads = {"n_heads": shape.n_heads, "n_kv_heads": shape.n_kv_heads, "head_dim": shape.head_dim}
    benches = {f"argmax of {VOCAB} logits": at.place.bench("argmax", rows=VOCAB)}
    for n in at.options.first(1, MANY_ROWS[-1]):
        benches |= {
            f"norm, {n} x {shape.hidden}": at.place.bench("rmsnorm", n=n, cols=shape.hidden),
            f"embedding, {n} x {shape.hidden}": at.place.bench("embed", n=n, rows=VOCAB, cols=shape.hidden),
            f"RoPE, norms of q and k included, {n} rows": at.place.bench("rotate", n=n, **heads),
        }
    rows = [at.with_bound(bench, label) for label, bench in benches.items()]
    note = "The bound counts the bytes that are read, not those written; they may still be in a cache."
    return Section(f"Single rows of a {shape.name} model, {at.place}", rows, (note,))


def attention(at: Comparison) -> Section:
    at.ceilings.begin_table()
    rows, judged = [], {"of ceiling": at.goals.attention, PEER: at.goals.attention_peer}
    with ExitStack() as stack:
        peers, notes = ({}, ()) if at.place.on_cpu else at.started(torch_attention, stack)
        for heads in at.options.first(*ATTENTION_SHAPES):
            for n in at.options.first(*ATTENTION_TOKENS):
                for peer in peers.values():
                    peer.call("prepare", n, *heads)
                label = f"{heads[1]} heads of {heads[0]} over {heads[2]}, {n} tokens"
                rows.append(at.with_peers(at.attention(n, n, heads), peers, label, judged))
    return Section(f"Causal attention, {at.place}", rows, notes)


def attention_of_few_rows(at: Comparison) -> Section:
    at.ceilings.begin_table()
    m, rows = ATTENTION_TOKENS[-1], []
    for heads in at.options.first(*ATTENTION_SHAPES):
        for n in at.options.first(*FEW_QUERIES):
            label = f"{heads[1]} heads of {heads[0]} over {heads[2]}, {n} of {m} tokens"
            rows.append(at.with_bound(at.attention(n, m, heads), label))
    note = "Keys and values may still be in a CPU cache from the previous run: a time can be below its bound."
    return Section(f"Attention of few rows, {at.place}", rows, (note,))


def attention_in_windows(at: Comparison) -> Section:
    """The share of full causal attention's time that a window takes, against its share of visible pairs."""
    rows, judged = [], {"time / pairs": at.goals.window}
    for n in ATTENTION_TOKENS[:1] if at.options.quick else WINDOW_TOKENS:
        whole, windowed = (at.attention(n, n, WINDOW_HEADS, window=window) for window in (0, WINDOW))
        contestants = {"full": at.place.turn(whole), "window": at.place.turn(windowed)}
        title = f"attention in a window of {WINDOW}, {n} tokens"
        times = in_turn(contestants, at.options.rounds, title)
        time, pairs = times["window"].median / times["full"].median, windowed.flops / whole.flops
        figures = {"of its time": time, "of its pairs": pairs, "time / pairs": time / pairs}
        rows.append(Row(f"{n} tokens", {**times, **figures}, judged, {"tokens": n, **at.place.keys}))
    heads = f"{WINDOW_HEADS[1]} heads of {WINDOW_HEADS[0]} over {WINDOW_HEADS[2]}"
    return Section(f"Attention in a window of {WINDOW} positions, {heads}, {at.place}", rows)


def selection(at: Comparison) -> Section:
    """Scores, selection and gathering as a share of the products and attention of a dense layer."""
    m = ATTENTION_TOKENS[-1]
    heads = (SMALL.head_dim, SMALL.n_heads, SMALL.n_kv_heads)
    small = {
        "scores": at.attention(1, m, heads, "scores"),
        "select": at.attention(1, m, heads, "select"),
        "gather": at.place.bench("regroup", m=m, cols=SMALL.hidden),
    }
    layer = {name: at.linear(op, m, n_out, n_in) for name, (op, n_out, n_in) in SMALL.matrices.items()}
    layer["attention"] = at.attention(m, m, heads)
    contestants = {name: at.place.turn(bench) for name, bench in {**small, **layer}.items()}
    times = in_turn(contestants, at.options.rounds, f"scores, selection and gathering, {m} tokens")
    dense = sum(times[name].median for name in layer)
    both = sum(times[name].median for name in small)
    rows = [Row(name, {OURS: times[name], "of a dense layer": times[name].median / dense}) for name in small]
    share = {"of a dense layer": both / dense, "of prefill": STAGES * both / (LAYERS * dense)}
    rows.append(Row("together", {**share}, {"of prefill": at.goals.selection}))
    note = f"A dense layer is {dense * 1e3:.1f} ms: its products and its attention. "
    note += f"The prefill has {STAGES} stages in {LAYERS} layers."
    return Section(f"Scores, selection, gathering, 135M model, {m} tokens, {at.place}", rows, (note,))


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
