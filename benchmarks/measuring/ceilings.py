"""Ceilings: the machine's limits, measured in the same rounds as the work that is compared with them.

On a GPU, which has no threads to wake up and is rarely shared, they are measured once per table.
"""

from collections.abc import Mapping
from functools import cached_property

from benchmarks.measuring.bench import Bench
from benchmarks.measuring.place import Place
from benchmarks.measuring.rounds import Contestant, Times

MULTIPLY_ADDS, READ = "multiply-add ceiling", "read ceiling"
RUNS = 5  # of one turn, the fastest counts: threads that just woke up may share a core for a while
CUDA_RUNS = 50  # of a table: the clocks of an idle GPU take some milliseconds to rise
GIGA = 1e9


class Ceilings:
    """The ceilings of the table begun last."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._multiply_adds = place.product_at_peak()
        self._known: dict[str, float] = {}

    def begin_table(self) -> None:
        self._known.clear()

    def _best(self, name: str, bench: Bench) -> Contestant:
        def run() -> float:
            if self._place.on_cpu:
                return min(bench.run() for _ in range(RUNS))
            if name not in self._known:
                self._known[name] = min(bench.run() for _ in range(CUDA_RUNS))
            return self._known[name]

        return run

    @cached_property
    def _read(self) -> Bench:
        return self._place.memory_sweep()

    @property
    def compute(self) -> dict[str, Contestant]:
        return {MULTIPLY_ADDS: self._best(MULTIPLY_ADDS, self._multiply_adds)}

    @property
    def both(self) -> dict[str, Contestant]:
        return {**self.compute, READ: self._best(READ, self._read)}

    def flops(self, times: Mapping[str, Times]) -> float:
        """Floating-point operations per second."""
        return self._multiply_adds.flops / times[MULTIPLY_ADDS].median

    def bandwidth(self, times: Mapping[str, Times]) -> float:
        """Bytes read per second."""
        return self._read.bytes / times[READ].median

    def bound(self, times: Mapping[str, Times], flops: float, n_bytes: float) -> float:
        """The least seconds in which this many operations and bytes can be done."""
        return max(flops / self.flops(times), n_bytes / self.bandwidth(times))
