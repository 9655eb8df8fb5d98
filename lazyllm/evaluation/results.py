"""A run's folder: a manifest of its conditions and one JSON line per finished item. A crash loses no line."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lazyllm.support.files import write_whole
from lazyllm.support.json_text import parse_object

MANIFEST, ITEMS, LOCK = "manifest.json", "items.jsonl", ".lock"


class Key(NamedTuple):
    """Identifies one result row: setting, data set, item."""

    setting: str
    dataset: str
    item: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Key:
        return cls(row["setting"], row["dataset"], row["item"])


class RunFolder:
    """A context manager, open in one process at a time. `rows` holds those of earlier runs and of this one.

    `retry_failed` drops the rows of failed items, so that they run again.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any], retry_failed: bool = False) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = open(path / LOCK, "w")  # noqa: SIM115 - held until the run ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RuntimeError(f"{path}: another process is writing to this run") from None
        try:
            drop_incomplete_line(path / ITEMS)
            self.rows = read_rows(path)
            check_manifest(path / MANIFEST, conditions, bool(self.rows))
            if retry_failed and any("error" in row for row in self.rows):
                self.rows = [row for row in self.rows if "error" not in row]
                write_whole(path / ITEMS, "".join(map(line_of, self.rows)))
            self._items = open(path / ITEMS, "a", encoding="utf-8")  # noqa: SIM115
        except BaseException:
            self._lock.close()
            raise
        self.done = {Key.of(row) for row in self.rows}

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._items.close()
        self._lock.close()

    def append(self, row: dict[str, Any]) -> None:
        """Appends a row and waits until it is on disk."""
        self._items.write(line_of(row))
        self._items.flush()
        os.fsync(self._items.fileno())
        self.rows.append(row)
        self.done.add(Key.of(row))


def line_of(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run, finished or not; a last line without a line break is not a row."""
    items = path / ITEMS
    lines = items.read_bytes().split(b"\n")[:-1] if items.exists() else []
    rows = [parse_object(line, f"{items}, line {number}") for number, line in enumerate(lines, 1)]
    for number, row in enumerate(rows, 1):
        if missing := [name for name in Key._fields if name not in row]:
            raise ValueError(f"{items}, line {number} is not a result row: it has no {missing[0]}")
    return rows


def read_manifest(path: Path) -> dict[str, Any]:
    return parse_object((path / MANIFEST).read_bytes(), path / MANIFEST)


def check_manifest(path: Path, conditions: Mapping[str, Any], begun: bool) -> None:
    """Writes the manifest; if there are rows already, raises an error unless their manifest is equal."""
    text = json.dumps(conditions, indent=2, ensure_ascii=False) + "\n"
    if not begun:
        write_whole(path, text)
        return
    if not path.exists():
        raise ValueError(f"{path.parent} holds results without their {path.name}. Give another folder")
    before, now = read_manifest(path.parent), json.loads(text)
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        told = "; ".join(
            f"{name} was {shown(before.get(name))} and is now {shown(now.get(name))}" for name in changed
        )
        raise ValueError(f"{path.parent} holds a run under other conditions: {told}. Give another folder")


def shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:157]}..."


def drop_incomplete_line(path: Path) -> None:
    """Truncates a last line that a crash left incomplete."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
            os.fsync(file.fileno())
