"""Ceilings: the machine's limits, measured in the same rounds as the work that is compared with them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from benchmarks.measuring.place import Place
from benchmarks.measuring.rounds import Contestant, Times
from lazyllm._core import Bench

MULTIPLY_ADDS, READ = "multiply-add ceiling", "read ceiling"
RUNS = 5  # of one turn, the fastest counts: threads that just woke up may share a core for a while
GIGA = 1e9


def best(bench: Bench) -> Contestant:
    return lambda: min(bench.run() for _ in range(RUNS))


class Ceilings:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._multiply_adds = place.bench("multiply_adds")

    @cached_property
    def _read(self) -> Bench:
        return self._place.memory_sweep()

    @property
    def compute(self) -> dict[str, Contestant]:
        return {MULTIPLY_ADDS: best(self._multiply_adds)}

    @property
    def both(self) -> dict[str, Contestant]:
        return {**self.compute, READ: best(self._read)}

    def flops(self, times: Mapping[str, Times]) -> float:
        """Floating-point operations per second."""
        return self._multiply_adds.flops / times[MULTIPLY_ADDS].median

    def bandwidth(self, times: Mapping[str, Times]) -> float:
        """Bytes read per second."""
        return self._read.bytes / times[READ].median

    def bound(self, times: Mapping[str, Times], flops: float, n_bytes: float) -> float:
        """The least seconds in which this many operations and bytes can be done."""
        return max(flops / self.flops(times), n_bytes / self.bandwidth(times))
