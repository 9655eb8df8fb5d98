"""The number of cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

PROCESSORS = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")
SIBLINGS = "core_cpus_list", "thread_siblings_list"  # the second before Linux 5.3


def cores() -> int:
    """Physical cores with a processor that the affinity mask allows, at most the share that the control group
    grants: two threads of one core share its units for products."""
    count = count_cores(PROCESSORS, os.sched_getaffinity(0))
    return max(1, min(count, granted_cores(CGROUP) or count))


def count_cores(folder: Path, usable: Collection[int]) -> int:
    """Cores that have at least one of the usable processors, by the files cpuN/topology; the number of
    usable processors if the files are not all there."""
    firsts = {_first_sibling(folder / f"cpu{cpu}" / "topology", cpu) for cpu in usable}
    return len(usable) if None in firsts else len(firsts)


def _first_sibling(folder: Path, cpu: int) -> int | None:
    """The first processor of the same core, by a list such as "0,64" or "0-1"; None where that is unknown."""
    for name in SIBLINGS:
        try:
            first = int((folder / name).read_text().replace("-", ",").split(",")[0])
        except (OSError, ValueError):
            continue
        return first if first <= cpu else None
    return None


def granted_cores(folder: Path) -> int:
    """The CPU time that a control group of version 2 or 1 grants, in cores rounded up; 0: no limit."""
    texts = [folder / "cpu.max"]
    if not texts[0].is_file():
        texts = [folder / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    try:
        quota, period = (int(number) for text in texts for number in text.read_text().split())
    except (OSError, ValueError):  # "max" is no limit
        return 0
    return -(-quota // period) if quota > 0 and period > 0 else 0
