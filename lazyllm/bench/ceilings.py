"""Ceilings: what the machine can do at most, measured in the rounds of whatever is held against it."""

from __future__ import annotations

from collections.abc import Mapping

from lazyllm._core import Bench
from lazyllm.bench.rounds import Contestant, Times

MULTIPLY_ADDS, READ = "multiply-add ceiling", "read ceiling"
RUNS = 5  # of one turn, the best of which counts: threads just woken may share a core for a while
READ_ROWS = READ_COLS = 1 << 13  # of float32: 256 MiB, more than a cache holds


def best(bench: Bench) -> Contestant:
    return lambda: min(bench.run() for _ in range(RUNS))


class Ceilings:
    def __init__(self, threads: int) -> None:
        self._multiply_adds = Bench("multiply_adds", threads=threads)
        self._read = Bench("read", rows=READ_ROWS, cols=READ_COLS, dtype="f32", threads=threads)

    @property
    def compute(self) -> dict[str, Contestant]:
        return {MULTIPLY_ADDS: best(self._multiply_adds)}

    @property
    def both(self) -> dict[str, Contestant]:
        return {**self.compute, READ: best(self._read)}

    def flops(self, times: Mapping[str, Times]) -> float:
        """Floating-point operations a second."""
        return self._multiply_adds.flops / times[MULTIPLY_ADDS].median

    def bandwidth(self, times: Mapping[str, Times]) -> float:
        """Bytes a second."""
        return self._read.bytes / times[READ].median

    def bound(self, times: Mapping[str, Times], flops: float, n_bytes: float) -> float:
        """The least seconds that this much work can take."""
        return max(flops / self.flops(times), n_bytes / self.bandwidth(times))
