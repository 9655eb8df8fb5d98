"""`merge`: the folders of several machines in one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import isclose
from pathlib import Path
from typing import Any

from lazyllm.evaluation.manifest import ONLY, Manifest, joined, read_manifest, shown
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
    paths = [user_path(one) for one in dict.fromkeys(map(str, folders))]
    if not paths:
        raise ValueError("no folder to merge is given")

    def both(one: Manifest, path: Path) -> Manifest:
        return joined(one, read_manifest(path), str(paths[0]), str(path))

    manifest = reduce(both, paths, read_manifest(paths[0]))
    parts = [(str(path), read_rows(path)) for path in paths]
    target = user_path(out)
    with RunFolder(target, manifest) as folder:
        folder.replace(united([(str(target), folder.rows), *parts]))
    return target


def united(parts: Iterable[tuple[str, Sequence[Row]]]) -> list[dict[str, Any]]:
    """The rows of all parts, in order; of equal results in one environment the first."""
    contents: dict[tuple[str, str], str] = {}
    results: dict[Key, dict[str, dict[str, Any]]] = {}
    origins: dict[Key, str] = {}
    errors: dict[Key, dict[str, Any]] = {}
    for where, rows in parts:
        check_contents(rows, where, contents, "in the folders before it")
        for row in rows:
            key = Key.of(row)
            if "error" in row:
                errors.setdefault(key, dict(row))
                continue
            timed = results.setdefault(key, {})
            for first in list(timed.values())[:1]:
                check_same(first, row, origins[key], where)
            origins.setdefault(key, where)
            timed.setdefault(row.get("environment", ONLY), dict(row))
    failed = [row for key, row in errors.items() if key not in results]
    return [row for timed in results.values() for row in timed.values()] + failed


def check_same(one: Row, other: Row, where: str, elsewhere: str) -> None:
    for name in {**one, **other}:
        if name not in UNLIKE and not same(one.get(name), other.get(name)):
            raise ValueError(
                f"item {one['item']} of {one['dataset']} under {one['setting']} has the {name} "
                f"{shown(one.get(name))} in {where} and {shown(other.get(name))} in {elsewhere}"
            )


def same(one: Any, other: Any) -> bool:
    """Equality, of floats within CLOSE."""
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
