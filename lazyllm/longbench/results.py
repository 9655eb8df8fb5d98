"""A run's folder: a manifest of its conditions and one line for each finished item, safe from crashes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST, ITEMS, LOCK = "manifest.json", "items.jsonl", ".lock"


class Key(NamedTuple):
    """What a line answers for."""

    setting: str
    dataset: str
    item: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Key:
        return cls(row["setting"], row["dataset"], row["item"])


class RunFolder:
    """To be used with `with`, one process at a time. `rows`: of earlier runs and of this one, in order.

    With `retry_failed` the lines of items that failed are dropped, so that they count as not done.
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
            self.rows = list(recovered(path / ITEMS))
            agree(path / MANIFEST, conditions, bool(self.rows))
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
        """On disk when this returns."""
        self._items.write(line_of(row))
        self._items.flush()
        os.fsync(self._items.fileno())
        self.rows.append(row)
        self.done.add(Key.of(row))


def line_of(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The finished items of a run, whether it has ended or not."""
    lines = complete_lines(path / ITEMS)
    return [parsed(path / ITEMS, number, line) for number, line in enumerate(lines, 1)]


def read_manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def write_whole(path: Path, text: str) -> None:
    """The file is the old one or the new one, whatever happens meanwhile."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def agree(path: Path, conditions: Mapping[str, Any], begun: bool) -> None:
    """Writes the manifest or, once there are results, compares it with theirs: conditions do not mix."""
    text = json.dumps(conditions, indent=2, ensure_ascii=False) + "\n"
    if not begun:
        write_whole(path, text)
        return
    if not path.exists():
        raise ValueError(f"{path.parent} holds results without their {path.name}. Give another folder")
    before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(text)
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        told = "; ".join(
            f"{name} was {shown(before.get(name))} and is now {shown(now.get(name))}" for name in changed
        )
        raise ValueError(f"{path.parent} holds a run under other conditions: {told}. Give another folder")


def shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:157]}..."


def complete_lines(path: Path) -> list[str]:
    """A last line without its end is one that a crash tore; it was never counted."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return whole.decode("utf-8").split("\n") if whole else []


def recovered(path: Path) -> Iterator[dict[str, Any]]:
    """Cuts off a torn last line, then gives the rows."""
    lines = complete_lines(path)
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(sum(len(line.encode("utf-8")) + 1 for line in lines))
            os.fsync(file.fileno())
    for number, line in enumerate(lines, 1):
        yield parsed(path, number, line)


def parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
        Key.of(row)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number} is no result of this program: {error}") from None
    return row
