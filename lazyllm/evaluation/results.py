"""A run's folder: a manifest and one JSON line for each finished item; and the merging of such folders. A crash
loses no line.

The manifest has conditions that all rows share, environments, and how items were selected:
{"format": 2, "model": name, "conditions": {…}, "environments": {id: {…}}, "selections": [{…}, …]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

from lazyllm.support.files import locked, user_path, write_whole
from lazyllm.support.json_text import json_digest, parse_object

FORMAT = 2
MANIFEST, ITEMS, LOCK = "manifest.json", "items.jsonl", ".lock"
SCORE = "score"  # the measure of a run that generates answers and scores them
CONTENT_DIGITS, ENVIRONMENT_DIGITS = 16, 8  # of a SHA-256
UNLIKE = ("timing", "environment")  # fields in which two rows of one result may differ
CLOSE = 1e-6  # relative: NumPy's last digits differ between processors

Manifest = dict[str, Any]
Row = Mapping[str, Any]


# ---- the manifest --------------------------------------------------------------------------------


def new_manifest(model: str, conditions: Mapping[str, Any], selection: Mapping[str, Any]) -> Manifest:
    """A manifest, with those options of `selection` that are not None."""
    manifest = {
        "format": FORMAT,
        "model": model,
        "conditions": conditions,
        "environments": {},
        "selections": [{name: value for name, value in selection.items() if value is not None}],
    }
    return parse_object(json.dumps(manifest), "the manifest")  # as plain data, equal to what is read later


def read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no run: there is no {MANIFEST}")
    manifest = parse_object(file.read_bytes(), file)
    if (found := manifest.get("format")) != FORMAT:
        raise ValueError(f"{file} is no manifest of format {FORMAT}; its format is {found!r}")
    return manifest


def joined(first: Manifest, second: Manifest, place: str, other_place: str) -> Manifest:
    """The manifest of both runs together; ValueError names conditions that differ, if rows cannot be compared."""
    base, other = first["conditions"], second["conditions"]
    if differing := differences(base, other):
        raise ValueError(
            f"{place} holds a run under other conditions than {other_place}: {differing}. Results that "
            "cannot be compared need folders of their own"
        )
    new = [selection for selection in second["selections"] if selection not in first["selections"]]
    merged = {name: {**value, **other[name]} if isinstance(value, dict) else value for name, value in base.items()}
    return {
        **first,
        "conditions": merged,
        "environments": {**first["environments"], **second["environments"]},
        "selections": [*first["selections"], *new],
    }


def differences(first: Mapping[str, Any], second: Mapping[str, Any], within: str = "") -> str:
    """The conditions that differ, as text; `within` a condition that is a mapping, only common keys count."""
    texts = []
    for name in {**first, **second}:
        value, other = first.get(name), second.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            texts.append(differences(value, other, f"{within}{name}, "))
        elif value != other and not (within and (name not in first or name not in second)):
            texts.append(f"{within}{name} is {shown(value)}, not {shown(other)}")
    return "; ".join(filter(None, texts))


def shown(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:157]}..."


# ---- the folder ----------------------------------------------------------------------------------


class Key(NamedTuple):
    """Identifies one result row: setting, data set, item."""

    setting: str
    dataset: str
    item: str

    @classmethod
    def of(cls, row: Row) -> Key:
        return cls(row["setting"], row["dataset"], row["item"])


@contextmanager
def opened_run(
    path: Path, manifest: Manifest, digests: Mapping[tuple[str, str], str] | None = None, planned: Collection[Key] = ()
) -> Iterator[RunFolder]:
    """A folder for results, locked for this process.

    The conditions in the manifest must agree with those of earlier rows. `digests`: those of the items, by
    data set and item; an earlier row whose item had another digest is an error. Failed rows of the `planned`
    trials are dropped, so that they run again.
    """
    path.mkdir(parents=True, exist_ok=True)
    try:
        lock = locked(path / LOCK)
    except BlockingIOError:
        raise RuntimeError(f"{path}: another process is writing to this run") from None
    with lock:
        rows = read_rows(path)
        if rows:
            manifest = joined(read_manifest(path), manifest, str(path), "this one")
        check_contents(rows, str(path), dict(digests or {}), "that is given now")
        yield RunFolder(path, manifest, [row for row in rows if "error" not in row or Key.of(row) not in planned])


class RunFolder:
    """The results in a folder: a manifest, and the rows of earlier runs and of this one."""

    def __init__(self, path: Path, manifest: Manifest, rows: list[dict[str, Any]]) -> None:
        self.path, self.items = path, path / ITEMS
        self._write(manifest)
        self.replace(rows)

    def append(self, row: Row, environment: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a row that was timed in an environment, and waits until it is on disk."""
        name, environments = json_digest(environment)[:ENVIRONMENT_DIGITS], self.manifest["environments"]
        if name not in environments:
            self._write({**self.manifest, "environments": {**environments, name: dict(environment)}})
        complete = {**row, "environment": name}
        try:
            with self.items.open("ab") as file:
                file.write(line_of(complete).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            reason = f"{error.strerror}; the rows before are kept, and the same call goes on after them"
            raise OSError(error.errno, reason, str(self.items)) from None
        self.rows.append(complete)
        return complete

    def replace(self, rows: list[dict[str, Any]]) -> None:
        """Writes all rows anew, without a last line that a crash left incomplete."""
        write_whole(self.items, "".join(map(line_of, rows)))
        self.rows = rows

    def sort(self, keys: Sequence[Key]) -> None:
        """Sorts the rows with these keys in the order of the keys; the other rows come first."""
        place = {key: number for number, key in enumerate(keys)}
        self.replace(sorted(self.rows, key=lambda row: place.get(Key.of(row), -1)))

    def _write(self, manifest: Manifest) -> None:
        self.manifest = manifest
        write_whole(self.path / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def line_of(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run, finished or not; a last line without a line break is not a row."""
    items = path / ITEMS
    lines = items.read_bytes().split(b"\n")[:-1] if items.exists() else []
    rows = [parse_object(line, f"{items}, line {number}") for number, line in enumerate(lines, 1)]
    for number, row in enumerate(rows, 1):
        if missing := {*Key._fields, "content", "environment"} - row.keys():
            raise ValueError(f"{items}, line {number} is not a result row: it has no {min(missing)}")
    return rows


def contents(items: Mapping[str, Iterable[Row]]) -> dict[tuple[str, str], str]:
    """By data set and item: the digest of the item."""
    return {
        (name, str(item["_id"])): json_digest(item)[:CONTENT_DIGITS] for name, rows in items.items() for item in rows
    }


def check_contents(rows: Sequence[Row], place: str, digests: dict[tuple[str, str], str], other_place: str) -> None:
    """Raises an error for a row whose item has another digest in `digests`; new digests are added to it."""
    for row in rows:
        item = row["dataset"], row["item"]
        if digests.setdefault(item, row["content"]) != row["content"]:
            raise ValueError(
                f"{place} holds results of an item {row['item']} of {row['dataset']} whose content is not "
                f"that of the item {other_place}. Results of other items need folders of their own"
            )


# ---- several folders in one ----------------------------------------------------------------------


def merge(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Writes the results in `folders`, and those that `out` holds already, to the folder `out`.

    The folders must have the same conditions. Rows of one trial must have the same result; one row stays for
    each environment in which it was timed. A failed item is dropped if another folder has its result.
    """
    paths = [user_path(folder) for folder in dict.fromkeys(map(str, folders))]
    if not paths:
        raise ValueError("no folder to merge is given")
    manifest = read_manifest(paths[0])
    for path in paths[1:]:
        manifest = joined(manifest, read_manifest(path), str(paths[0]), str(path))
    parts = [(str(path), read_rows(path)) for path in paths]
    target = user_path(out)
    with opened_run(target, manifest) as folder:
        folder.replace(united([(str(target), folder.rows), *parts]))
    return target


def united(parts: Iterable[tuple[str, Sequence[Row]]]) -> list[dict[str, Any]]:
    """The rows of all parts, in order; of equal results in one environment the first."""
    digests: dict[tuple[str, str], str] = {}
    first: dict[Key, tuple[Row, str]] = {}
    results: dict[tuple[Key, str], Row] = {}
    errors: dict[Key, Row] = {}
    for place, rows in parts:
        check_contents(rows, place, digests, "in the folders before it")
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
        value, other_value = row.get(name), other.get(name)
        if name not in UNLIKE and not same(value, other_value):
            raise ValueError(
                f"item {row['item']} of {row['dataset']} under {row['setting']} has the {name} "
                f"{shown(value)} in {place} and {shown(other_value)} in {other_place}"
            )


def same(value: Any, other: Any) -> bool:
    """True if both are equal; floats may differ by CLOSE."""
    if isinstance(value, float) and isinstance(other, float):
        return isclose(value, other, rel_tol=CLOSE, abs_tol=CLOSE)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)
