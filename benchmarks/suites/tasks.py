"""Suite `tasks`: how evenly the ops of a layer divide among 2, 16 and 64 threads, counted and not timed."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measuring.models import LARGE, MEDIUM, SMALL, ModelShape
from benchmarks.measuring.place import Place
from benchmarks.measuring.report import Figure, Row, Section
from benchmarks.options import Options

THREADS = (2, 16, 64)
PROMPT = 1024
QUICK_PROMPT = 128
NOTE = (
    "Counted, not timed: threads need no cores of their own. Turns are tasks / threads, rounded up; idle is "
    "the share of all threads' time in which a thread has no task of an op, if the tasks of a job take "
    "equally long. The layer's idle share weighs ops by their multiply-adds. Conversions of rows of x, and "
    "merging attention, are jobs of their own and not in turns. What lies between jobs is not counted: "
    "norms, RoPE, waking threads and waiting for the last."
)


@dataclass(frozen=True)
class Division:
    """The tasks of each job of an op, and those of the job that has nearly all of its work."""

    jobs: list[int]
    tasks: int
    work: float  # multiply-adds

    def turns(self, threads: int) -> int:
        return -(-self.tasks // threads)

    def time(self, threads: int) -> float:
        """In multiply-adds of one thread."""
        return self.work / self.tasks * self.turns(threads)

    def idle(self, threads: int) -> float:
        return 1 - self.work / (threads * self.time(threads))


def tasks(options: Options) -> Iterator[Section]:
    prompt = QUICK_PROMPT if options.quick else PROMPT
    for shape in (SMALL,) if options.quick else (SMALL, MEDIUM, LARGE):
        yield section(shape, 1, prompt, f"a decode step after {prompt} tokens")
        yield section(shape, prompt, prompt, f"a prefill of {prompt} tokens")


def section(shape: ModelShape, n: int, prompt: int, what: str) -> Section:
    by_threads = {threads: divisions(shape, n, prompt, Place(threads)) for threads in THREADS}
    rows = []
    for name in by_threads[THREADS[0]]:
        figures: dict[str, Figure] = {}
        for threads, ops in by_threads.items():
            figures[f"tasks, {threads} threads"] = " + ".join(map(str, ops[name].jobs))
            figures[f"turns, {threads}"] = str(ops[name].turns(threads))
            figures[f"idle, {threads}"] = f"{ops[name].idle(threads):.0%}"
        rows.append(Row(name, figures))
    layer: dict[str, Figure] = {}
    for threads, ops in by_threads.items():
        least = sum(op.work for op in ops.values()) / threads
        layer[f"tasks, {threads} threads"] = f"{sum(len(op.jobs) for op in ops.values())} jobs"
        layer[f"turns, {threads}"] = str(sum(op.turns(threads) for op in ops.values()))
        layer[f"idle, {threads}"] = f"{1 - least / sum(op.time(threads) for op in ops.values()):.0%}"
    return Section(f"A layer of a {shape.name} model, {what}", [*rows, Row("layer", layer)], (NOTE,))


def divisions(shape: ModelShape, n: int, prompt: int, place: Place) -> dict[str, Division]:
    products = {}
    for name, (op, rows, cols) in shape.matrices.items():
        jobs = place.bench(op, n=n, rows=rows, cols=cols, dtype="bf16").count()
        products[name] = Division(jobs, jobs[-1], n * rows * cols)
    heads = {"n_heads": shape.n_heads, "n_kv_heads": shape.n_kv_heads, "head_dim": shape.head_dim}
    bench = place.bench("attention", n=n, m=prompt, rows=1, cols=shape.hidden, **heads)
    jobs = bench.count()
    return {**products, "attention": Division(jobs, jobs[0], bench.flops / 2)}
