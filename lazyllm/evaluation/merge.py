"""`merge`: the folders of several machines in one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from pathlib import Path
from typing import Any

from lazyllm.evaluation.manifest import joined, read_manifest, shown
from lazyllm.evaluation.results import Key, RunFolder, check_contents, read_rows
from lazyllm.support.files import user_path

UNLIKE = ("timing", "environment")  # fields in which two rows of one result may differ
CLOSE = 1e-6  # relative: NumPy's last digits differ between processors

Row = Mapping[str, Any]


def merge(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Writes the results in `folders`, and those that `out` holds already, to the folder `out`.

    The folders must be of the same conditions. A result that is there more than once must be the same; it
    stays once for each environment that it was timed in. A failed item is dropped where another folder has
    its result.
    """
    paths = [user_path(folder) for folder in dict.fromkeys(map(str, folders))]
    if not paths:
        raise ValueError("no folder to merge is given")
    manifest = read_manifest(paths[0])
    for path in paths[1:]:
        manifest = joined(manifest, read_manifest(path), str(paths[0]), str(path))
    parts = [(str(path), read_rows(path)) for path in paths]
    target = user_path(out)
    with RunFolder(target, manifest) as folder:
        folder.replace(united([(str(target), folder.rows), *parts]))
    return target


def united(parts: Iterable[tuple[str, Sequence[Row]]]) -> list[dict[str, Any]]:
    """The rows of all parts, in order; of equal results in one environment the first."""
    contents: dict[tuple[str, str], str] = {}
    first: dict[Key, tuple[Row, str]] = {}
    results: dict[tuple[Key, str], Row] = {}
    errors: dict[Key, Row] = {}
    for place, rows in parts:
        check_contents(rows, place, contents, "in the folders before it")
        for row in rows:
            key = Key.of(row)
            if "error" in row:
                errors.setdefault(key, row)
            else:
                check_same(*first.setdefault(key, (row, place)), row, place)
                results.setdefault((key, row["environment"]), row)
    failed = [row for key, row in errors.items() if key not in first]
    return [dict(row) for row in (*results.values(), *failed)]


def check_same(row: Row, place: str, other: Row, other_place: str) -> None:
    for name in {**row, **other}:
        if name not in UNLIKE and not same(row.get(name), other.get(name)):
            raise ValueError(
                f"item {row['item']} of {row['dataset']} under {row['setting']} has the {name} "
                f"{shown(row.get(name))} in {place} and {shown(other.get(name))} in {other_place}"
            )


def same(value: Any, other: Any) -> bool:
    """Equality, of floats within CLOSE."""
    if isinstance(value, float) and isinstance(other, float):
        return isclose(value, other, rel_tol=CLOSE, abs_tol=CLOSE)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)
