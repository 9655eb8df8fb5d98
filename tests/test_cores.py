"""Counting the cores that this process may use, by the files of the system."""

import os
from pathlib import Path

import pytest

from lazyllm.machine.cores import cores, count_cores, granted_cores

APART = "0,4 1,5 2,6 3,7 0,4 1,5 2,6 3,7"


def plant(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("machine", "lists", "usable", "expected"),
    [
        ("two threads a core, far apart", APART, range(8), 4),
        ("four threads a core", "0-1,4-5 0-1,4-5 2-3,6-7 2-3,6-7 " * 2, range(8), 2),
        ("one thread a core", "0 1 2 3 4 5 6 7", range(8), 8),
        ("the second threads of three", APART, (4, 5, 6), 3),
        ("a core with one thread among others with two", "0-1 0-1 2-3 2-3 4 5 6 7", range(8), 6),
        ("a file missing", "0-1 0-1 - 2-3 4-5 4-5 6-7 6-7", range(8), 8),
        ("a file missing that does not matter", "0-1 0-1 - 3 4-5 4-5 6-7 6-7", (0, 1, 3, 4, 5, 6, 7), 4),
        ("no files", "- - -", range(3), 3),
        ("no processor", "0", (), 0),
    ],
)
def test_cores(tmp_path: Path, machine: str, lists: str, usable: tuple[int, ...], expected: int) -> None:
    for cpu, text in enumerate(lists.split()):
        if text != "-":
            plant(tmp_path, f"cpu{cpu}/topology/thread_siblings_list", f"{text}\n")
    assert count_cores(tmp_path, usable) == expected, machine


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 0),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, 0),
        ({"cpu.max": ""}, 0),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "none\n"}, 0),
    ],
)
def test_cores_that_a_control_group_grants(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        plant(tmp_path, name, text)
    assert granted_cores(tmp_path) == expected


def test_this_process_may_use_a_core() -> None:
    assert 1 <= cores() <= len(os.sched_getaffinity(0))
