"""Suite `memory`: what a session takes at its peak, beside what is set aside for it by estimate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lazyllm.bench.options import Options
from lazyllm.bench.place import Place
from lazyllm.bench.process import Process
from lazyllm.bench.report import Row, Table
from lazyllm.environment import field
from lazyllm.memory import session_bytes

SUITE = "memory"
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
WARM_UP_TOKENS = 32
MIB = 1 << 20


class Probe:
    """A model in a process of its own, so that nobody else's memory is counted."""

    def __init__(self, folder: Path) -> None:
        self._llm = Place().load(folder)
        self._llm.session().forward(
            np.arange(min(WARM_UP_TOKENS, self._llm.config.vocab))
        )  # maps the weights

    def growth(self, ids: list[int]) -> int:
        """By how many bytes the resident memory grows, at its peak, when a session reads these tokens."""
        CLEAR_REFS.write_text(RESET_PEAK)
        before = resident("VmHWM")
        self._llm.session().forward(ids, progress=False)
        return resident("VmHWM") - before


def resident(name: str) -> int:
    kilobytes = field(STATUS, name)
    if kilobytes is None:
        raise RuntimeError(f"{STATUS} has no {name}, so the peak of memory is unknown")
    return int(kilobytes.split()[0]) * 1024


def memory(options: Options) -> Iterator[Table]:
    rows = []
    for n in options.fitting_tokens:
        with Process(Probe, options.folder, environment={}) as probe:
            grown = int(probe.call("growth", options.prompt(n)))
        estimate = session_bytes(options.config, n)
        figures = {
            "peak growth, MiB": grown / MIB,
            "estimate, MiB": estimate / MIB,
            "growth / estimate": grown / estimate,
        }
        rows.append(Row(f"{n} tokens", {**figures}, {}, {"tokens": n}))
    notes = ("The weights are mapped and touched before; a new process for each row.", *options.too_long)
    yield Table(SUITE, f"Memory of a session, {options.config.name}", rows, notes)
