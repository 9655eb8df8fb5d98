"""The suites, in the order in which they run. To add one, write its module here and name it in SUITES."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.measuring.report import Section
from benchmarks.options import Options
from benchmarks.suites import (
    decode,
    experts,
    formats,
    generation,
    memory,
    ops,
    prefill,
    pruned,
    scaling,
    sessions,
    shapes,
    sharing,
    tasks,
)


@dataclass(frozen=True)
class Suite:
    measure: Callable[[Options], Iterator[Section]]
    by_default: bool = True  # runs when no suite is named
    cpu_only: str = ""  # the reason why it is left out on a GPU


SUITES = {
    "ops": Suite(ops.ops),
    "prefill": Suite(prefill.prefill),
    "pruned": Suite(pruned.pruned),
    "decode": Suite(decode.decode),
    "scaling": Suite(scaling.scaling, cpu_only="it compares numbers of threads"),
    "sharing": Suite(sharing.sharing),
    "memory": Suite(memory.memory, cpu_only="it measures the memory of a process on the CPU"),
    "sessions": Suite(sessions.sessions, cpu_only="forks share memory on the CPU only"),
    "tasks": Suite(tasks.tasks, by_default=False, cpu_only="it counts the tasks of the CPU's threads"),
    "shapes": Suite(shapes.shapes, by_default=False),
    "formats": Suite(formats.formats, cpu_only="it compares formats and arithmetics of the CPU"),
    "generation": Suite(generation.generation, by_default=False),
    "experts": Suite(experts.experts, by_default=False),
}
ALL = "all"


def choose_suites(names: tuple[str, ...]) -> tuple[str, ...]:
    """The named suites, every suite for `all`, or the default ones if none is named."""
    if unknown := [name for name in names if name not in (*SUITES, ALL)]:
        raise ValueError(f"there is no suite {unknown[0]!r}; the suites are {', '.join(SUITES)}, or {ALL}")
    chosen = names or tuple(name for name, suite in SUITES.items() if suite.by_default)
    return tuple(name for name in SUITES if name in chosen or ALL in chosen)
