"""Suite `memory`: what a session takes at its peak, beside what is set aside for it by estimate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.measuring.place import Place
from benchmarks.measuring.process import Process
from benchmarks.measuring.report import Row, Section
from benchmarks.options import Options
from lazyllm.machine.info import field
from lazyllm.pruning import Pruning

SUITE = "memory"
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
WARM_UP_TOKENS = 32
KIB, MIB = 1 << 10, 1 << 20
PRUNED_AFTER_LAYER, KEEP = 0, 0.02


class Probe:
    """A model in a process of its own, so that nobody else's memory is counted."""

    def __init__(self, folder: Path) -> None:
        self._llm = Place().load(folder)
        self._llm.session().forward(
            np.arange(min(WARM_UP_TOKENS, self._llm.config.vocab))
        )  # maps the weights

    def growth(self, ids: list[int], pruning: Pruning | None = None) -> int:
        """By how many bytes the resident memory grows, at its peak, when a session reads these tokens."""
        CLEAR_REFS.write_text(RESET_PEAK)
        before = resident("VmHWM")
        self._llm.session(pruning).forward(ids, progress=False)
        return resident("VmHWM") - before

    def estimate(self, n: int) -> int:
        return self._llm.session().core.bytes_for(n)


def resident(name: str) -> int:
    kilobytes = field(STATUS, name)
    if kilobytes is None:
        raise RuntimeError(f"{STATUS} has no {name}, so the peak of memory is unknown")
    return int(kilobytes.split()[0]) * 1024


def grown_by(options: Options, n: int, pruning: Pruning | None) -> tuple[int, int]:
    """Bytes that the resident memory grew by, and the core's estimate of them."""
    with Process(Probe, options.folder, environment={}) as probe:
        return probe.call("growth", options.prompt(n), pruning), probe.call("estimate", n)


def memory(options: Options) -> Iterator[Section]:
    rows = []
    for n in options.fitting_tokens:
        grown, estimate = grown_by(options, n, None)
        pruned, _ = grown_by(options, n, Pruning({PRUNED_AFTER_LAYER: KEEP}))
        figures = {
            "peak growth, MiB": grown / MIB,
            "estimate, MiB": estimate / MIB,
            "growth / estimate": grown / estimate,
            "KiB per token": grown / KIB / n,
            "KiB per token, pruned": pruned / KIB / n,
        }
        rows.append(Row(f"{n} tokens", {**figures}, {}, {"tokens": n}))
    notes = (
        "The weights are mapped and touched before; a new process for each figure.",
        f"Pruned: {KEEP:.0%} of the tokens go on after layer {PRUNED_AFTER_LAYER}.",
        *options.too_long,
    )
    yield Section(SUITE, f"Memory of a session, {options.config.name}", rows, notes)
