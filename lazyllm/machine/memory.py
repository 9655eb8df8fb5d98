"""Memory: how much this process can still allocate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lazyllm.support.files import system_text, system_values

MEMINFO = Path("/proc/meminfo")
GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CACHES = ("inactive_file", "active_file")


def available_bytes() -> int | None:
    """Bytes left on the machine and in the process's control groups, the least of them; None if unknown."""
    on_machine = [1024 * kilobytes for kilobytes in numbers(MEMINFO, "MemAvailable")]
    return min([*on_machine, *left_in_groups()], default=None)


def left_in_groups() -> Iterator[int]:
    """Of the process's group of cgroups v2 and each group around it that has a limit.

    Cached pages of files, mapped weights among them, count as left: they are dropped when memory gets scarce.
    """
    entries = system_text(GROUP).splitlines()
    own = next((entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")), "")
    group = GROUPS if ".." in own else GROUPS / own  # a container does not see where its group lies
    for place in (group, *group.parents):
        if not place.is_relative_to(GROUPS):
            break
        try:
            limit, use = (int(system_text(place / name)) for name in ("memory.max", "memory.current"))
        except ValueError:  # the root has no limit; another group may have "max"
            continue
        yield max(0, limit - use + sum(numbers(place / "memory.stat", *CACHES)))


def numbers(file: Path, *names: str) -> list[int]:
    return [int(value.split()[0]) for value in system_values(file, *names)]


def fits(n_bytes: int) -> bool:
    available = available_bytes()
    return available is None or n_bytes <= available


def check_memory(asked: int, what: str) -> None:
    """Raises MemoryError if `what` needs more bytes, `asked`, than are available."""
    available = available_bytes()
    if available is not None and asked > available:
        raise MemoryError(
            f"{what} needs {asked} bytes ({asked / 2**30:.2f} GiB); "
            f"{available} ({available / 2**30:.2f} GiB) are available"
        )
