"""The number of cores that this process may use."""

import os
from collections.abc import Collection
from pathlib import Path

from lazyllm.support.files import system_text

PROCESSORS = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """The number of physical cores that the affinity mask allows, at most the control group's share. Two threads
    of one core would share its units for products."""
    count = count_cores(PROCESSORS, os.sched_getaffinity(0))
    return max(1, min(count, granted_cores(CGROUP) or count))


def count_cores(folder: Path, usable: Collection[int]) -> int:
    """The number of cores with a usable processor, told apart by the lists of their processors, such as "0,64";
    the number of usable processors if a list is missing."""
    lists = {system_text(folder / f"cpu{cpu}/topology/thread_siblings_list") for cpu in usable}
    return len(usable) if "" in lists else len(lists)


def granted_cores(folder: Path) -> int:
    """The CPU time that a control group of version 2 or 1 grants, in cores rounded up; 0: no limit."""
    first_version = (system_text(folder / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    try:
        quota, period = map(int, (system_text(folder / "cpu.max") or "".join(first_version)).split())
    except ValueError:  # no such files, or "max", which is no limit
        return 0
    return -(-quota // period) if quota > 0 else 0
