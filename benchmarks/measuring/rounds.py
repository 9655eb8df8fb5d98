"""Rounds of timing: contestants run in turn, so that a disturbance of the machine reaches all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lazyllm.support.progress import bar

Contestant = Callable[[], float]  # runs once and returns its seconds
MIN_SECONDS = 0.02  # of a turn; a shorter op is repeated, as it would be within a pass
PAUSE_SECONDS = 0.02  # before each turn, until the threads of the previous contestant stop spinning


@dataclass(frozen=True)
class Times:
    """The seconds of one contestant's rounds, without the warm-up."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        return f"{quantity(self.median)} ({quantity(min(self.seconds))} to {quantity(max(self.seconds))})"

    def plain(self) -> dict[str, object]:
        return {
            "median": self.median,
            "low": min(self.seconds),
            "high": max(self.seconds),
            "rounds": list(self.seconds),
        }


def quantity(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def timed(work: Callable[[], object]) -> Contestant:
    def run() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return run


def repeated(run: Contestant) -> float:
    """Repeats a short op for MIN_SECONDS and returns the mean seconds of a run."""
    seconds, runs = 0.0, 0
    while seconds < MIN_SECONDS:
        seconds += run()
        runs += 1
    return seconds / runs


def in_turn(contestants: Mapping[str, Contestant], rounds: int, title: str) -> dict[str, Times]:
    """Runs every contestant once to warm up, then `rounds` times in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    with bar((rounds + 1) * len(contestants), title, "run", progress=True, leave=False) as line:
        for round_ in range(rounds + 1):
            for name, run in contestants.items():
                time.sleep(PAUSE_SECONDS)
                taken = run()
                if round_:
                    seconds[name].append(taken)
                line.update()
    return {name: Times(tuple(values)) for name, values in seconds.items()}
