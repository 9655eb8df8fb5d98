"""Memory: how much this process can still allocate."""

from __future__ import annotations

MEMINFO = "/proc/meminfo"
GROUP_LIMIT, GROUP_USE = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"


def available_bytes() -> int | None:
    """Bytes left on the machine or in the process's control group, the smaller of both; None if unknown."""
    left = []
    try:
        with open(MEMINFO) as file:
            left += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
        with open(GROUP_LIMIT) as limit, open(GROUP_USE) as use:
            if (max_bytes := limit.read().strip()) != "max":
                left.append(max(0, int(max_bytes) - int(use.read())))
    except (OSError, ValueError):
        pass
    return min(left, default=None)


def fits(n_bytes: int) -> bool:
    available = available_bytes()
    return available is None or n_bytes <= available


def check_memory(asked: int, n_tokens: int) -> None:
    """Raises MemoryError if a session of `n_tokens` tokens needs more bytes, `asked`, than are available."""
    available = available_bytes()
    if available is not None and asked > available:
        raise MemoryError(
            f"a session of {n_tokens} tokens needs {asked} bytes ({asked / 2**30:.2f} GiB); "
            f"{available} ({available / 2**30:.2f} GiB) are available"
        )
