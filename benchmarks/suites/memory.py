"""Suite `memory`: what a model and a session take at their peak, beside the estimate, and what fits by it."""

import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring.models import LARGE, MEDIUM, write_model
from benchmarks.measuring.place import Place
from benchmarks.measuring.process import Process
from benchmarks.measuring.report import Row, Section
from benchmarks.options import Options
from benchmarks.suites.prefill import read
from lazyllm.llm import LLM
from lazyllm.machine.info import field
from lazyllm.pruning import Pruning

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
WARM_UP_TOKENS = 32
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (1, 2, 4, 8, 16, 32, 64)  # GiB
VOCAB, CONTEXT = 32000, 1 << 17
PRUNED_AFTER_LAYER, KEEP = 0, 0.02


class Probe:
    """A model in a process of its own, so that nobody else's memory is counted."""

    def __init__(self, folder: Path) -> None:
        before = bytes_in(STATUS, "VmRSS")
        self._llm = Place().load(folder)
        read(self._llm, [*range(min(WARM_UP_TOKENS, self._llm.config.vocab))])  # maps the weights
        self._others = before  # bytes of Python and its modules

    def growth(self, ids: list[int], pruning: Pruning | None = None) -> int:
        """By how many bytes the resident memory grows, at its peak, when a session reads these tokens."""
        CLEAR_REFS.write_text(RESET_PEAK)
        before = bytes_in(STATUS, "VmHWM")
        read(self._llm, ids, pruning)
        return bytes_in(STATUS, "VmHWM") - before

    def peak(self) -> int:
        """The bytes of the weights and the session together."""
        return bytes_in(STATUS, "VmHWM") - self._others

    def estimates(self, n: int) -> tuple[int, int]:
        """Bytes of the weights, and of a session of n tokens."""
        return self._llm.core.bytes, self._llm.session().core.bytes_for(n)


def bytes_in(file: Path, name: str) -> int:
    """The bytes of that name in a file of /proc, which has kilobytes."""
    kilobytes = field(file, name)
    if kilobytes is None:
        raise RuntimeError(f"{file} has no {name}, so the memory of this process is unknown")
    return int(kilobytes.split()[0]) * KIB


def largest_context(llm: LLM, memory: int) -> int:
    """The most tokens of a session that fit into so many bytes beside the weights."""
    core, left = llm.session().core, memory - llm.core.bytes
    return bisect_right(range(llm.config.context + 1), left, lo=1, key=core.bytes_for) - 1


def contexts(folder: Path, label: str) -> Iterator[Row]:
    for llm in Place().load(folder), Place().load(folder, kv="f16"):
        fitting = {f"{size} GiB": str(largest_context(llm, size * GIB)) for size in SIZES}
        weights = {"weights, GiB": llm.core.bytes / GIB}
        yield Row(f"{label}, keys and values in {llm.kv}", {**weights, **fitting})


def limits(options: Options) -> Section:
    rows = [*contexts(options.folder, options.config.name)]
    with tempfile.TemporaryDirectory() as scratch:
        for shape in (MEDIUM, LARGE):
            folder = Path(scratch) / shape.name
            write_model(folder, shape, VOCAB, CONTEXT, empty=True)
            rows += contexts(folder, f"{shape.name} shape")
    notes = (
        "Tokens of a dense session, with weights in bf16 and a context of at most that of the model.",
        f"{MEDIUM.name} and {LARGE.name}: {MEDIUM}; {LARGE}; vocabulary {VOCAB}, context {CONTEXT}.",
        "Python and its modules take another 0.1 GiB.",
    )
    return Section("Largest context by memory", rows, notes)


def memory(options: Options) -> Iterator[Section]:
    rows = []
    for n in options.fitting_tokens:
        with Process(Probe, options.folder, environment={}) as probe:
            grown, peak = probe.call("growth", options.prompt(n)), probe.call("peak")
            weights, estimate = probe.call("estimates", n)
        with Process(Probe, options.folder, environment={}) as probe:
            pruned = probe.call("growth", options.prompt(n), Pruning({PRUNED_AFTER_LAYER: KEEP}))
        figures = {
            "peak growth, MiB": grown / MIB,
            "estimate, MiB": estimate / MIB,
            "growth / estimate": grown / estimate,
            "with weights: peak, MiB": peak / MIB,
            "estimate with weights, MiB": (weights + estimate) / MIB,
            "peak / estimate": peak / (weights + estimate),
            "KiB per token": grown / KIB / n,
            "KiB per token, pruned": pruned / KIB / n,
        }
        rows.append(Row(f"{n} tokens", {**figures}, {}, {"tokens": n}))
    notes = (
        "The weights are mapped and touched before; a new process for each figure.",
        f"Pruned: {KEEP:.0%} of the tokens go on after layer {PRUNED_AFTER_LAYER}.",
        *options.too_long,
    )
    yield Section(f"Memory of a session, {options.config.name}", rows, notes)
    yield limits(options)
