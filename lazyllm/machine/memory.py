"""Memory: how much this process can still allocate."""

from collections.abc import Iterator
from pathlib import Path

from lazyllm import _core
from lazyllm.support.files import system_text, system_values

MEMINFO = Path("/proc/meminfo")
GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CACHES = ("inactive_file", "active_file")
LEAST_SPARE = 64  # tokens reserved ahead
SPARE = 4  # on the CPU also a quarter of the tokens (total // SPARE): unused pages take no memory


def available_bytes() -> int | None:
    """Bytes left on the machine and in the process's control groups, the least of them; None if unknown."""
    on_machine = [1024 * kilobytes for kilobytes in numbers(MEMINFO, "MemAvailable")]
    return min([*on_machine, *left_in_groups()], default=None)


def left_in_groups() -> Iterator[int]:
    """Bytes left in the process's group of cgroups v2 and in those around it with a limit. Cached pages of
    files count as left: they are dropped when memory gets scarce."""
    entries = system_text(GROUP).splitlines()
    name = next((entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")), "")
    group = GROUPS if ".." in name else GROUPS / name  # a container does not see where its group lies
    for place in (group, *group.parents):
        if not place.is_relative_to(GROUPS):
            break
        try:
            limit, use = (int(system_text(place / file)) for file in ("memory.max", "memory.current"))
        except ValueError:  # the root has no limit; another group may have "max"
            continue
        yield max(0, limit - use + sum(numbers(place / "memory.stat", *CACHES)))


def numbers(file: Path, *names: str) -> list[int]:
    return [int(value.split()[0]) for value in system_values(file, *names)]


def check_memory(asked: int, what: str) -> None:
    """Raises MemoryError if `what` needs more bytes, `asked`, than are available."""
    available = available_bytes()
    if available is not None and asked > available:
        raise MemoryError(
            f"{what} needs {asked} bytes ({asked / 2**30:.2f} GiB); "
            f"{available} ({available / 2**30:.2f} GiB) are available"
        )


def reserve(session: _core.Session, total: int, soon: int, context: int, on_cpu: bool) -> int:
    """Reserves `total` tokens, `soon` of which are next to come, and more where they fit; returns the capacity.
    MemoryError beyond free memory."""
    capacity = min(context, total + max(LEAST_SPARE, session.length, total // SPARE if on_cpu else 0))
    if on_cpu:  # Linux overcommits; other devices refuse by themselves
        available = available_bytes()
        if available is not None and session.bytes_for(capacity) > available:
            capacity = total
        check_memory(session.bytes_for(capacity), f"a session of {capacity} tokens")
    session.reserve(capacity, soon)
    return capacity
