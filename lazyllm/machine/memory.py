"""Memory: how much this process can still allocate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazyllm import _core

MEMINFO = Path("/proc/meminfo")
GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CACHES = ("inactive_file", "active_file")
LEAST_SPARE = 64  # tokens reserved ahead
SPARE = 4  # and a quarter of the context on the CPU, which takes no memory for what is not used


def available_bytes() -> int | None:
    """Bytes left on the machine and in the process's control groups, the least of them; None if unknown."""
    on_machine = [kilobytes * 1024 for kilobytes in numbers(MEMINFO, "MemAvailable:")]
    return min([*on_machine, *left_in_groups()], default=None)


def left_in_groups() -> Iterator[int]:
    """Of the process's group of cgroups v2 and each group around it that has a limit.

    Cached pages of files, mapped weights among them, count as left: they are dropped when memory gets scarce.
    """
    try:
        entries = GROUP.read_text().splitlines()
    except OSError:
        return
    own = next((entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")), "")
    group = GROUPS if ".." in own else GROUPS / own  # a container does not see where its group lies
    for place in (group, *group.parents):
        if not place.is_relative_to(GROUPS):
            break
        try:
            limit, use = int((place / "memory.max").read_text()), int((place / "memory.current").read_text())
        except (OSError, ValueError):  # the root has no limit; another group may have "max"
            continue
        yield max(0, limit - use + sum(numbers(place / "memory.stat", *CACHES)))


def numbers(file: Path, *names: str) -> list[int]:
    """Of a file of lines `name number …`, the numbers with these names; none if it cannot be read."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        return [int(line[1]) for line in lines if line and line[0] in names]
    except (OSError, ValueError, IndexError):
        return []


def check_memory(asked: int, what: str) -> None:
    """Raises MemoryError if `what` needs more bytes, `asked`, than are available."""
    available = available_bytes()
    if available is not None and asked > available:
        raise MemoryError(
            f"{what} needs {asked} bytes ({asked / 2**30:.2f} GiB); "
            f"{available} ({available / 2**30:.2f} GiB) are available"
        )


def reserve(session: _core.Session, total: int, context: int, on_cpu: bool) -> int:
    """Reserves buffers for `total` tokens and, where they fit, for more up to the model's context; returns
    their capacity. MemoryError beyond the free memory."""
    capacity = min(context, total + max(LEAST_SPARE, session.length, total // SPARE if on_cpu else 0))
    if on_cpu:  # Linux overcommits; other devices refuse by themselves
        available = available_bytes()
        if available is not None and session.bytes_for(capacity) > available:
            capacity = total
        check_memory(session.bytes_for(capacity), f"a session of {capacity} tokens")
    session.reserve(capacity)
    return capacity
