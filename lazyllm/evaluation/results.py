"""A run's folder: a manifest and one JSON line per finished item. A crash loses no line."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lazyllm.evaluation.conditions import short_digest
from lazyllm.evaluation.manifest import MANIFEST, Manifest, joined, read_manifest, text_of
from lazyllm.support.files import locked, write_whole
from lazyllm.support.json_text import parse_object

ITEMS, LOCK = "items.jsonl", ".lock"
ENVIRONMENT_DIGITS = 8


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

    The conditions in the manifest must agree with those of earlier rows. `digests`: those of the items, by
    data set and item; a row of an item that was another is an error. Rows of `again` that failed are dropped,
    so that they run again.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        digests: Mapping[tuple[str, str], str] | None = None,
        again: Collection[Key] = (),
    ) -> None:
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = locked(path / LOCK, wait=False)  # held until the run ends
        except BlockingIOError:
            raise RuntimeError(f"{path}: another process is writing to this run") from None
        try:
            self.path, self.items = path, path / ITEMS
            drop_incomplete_line(self.items)
            self.rows = read_rows(path)
            if self.rows:
                manifest = joined(read_manifest(path), manifest, str(path), "this one")
            check_contents(self.rows, str(path), dict(digests or {}), "that is given now")
            self._write(manifest)
            kept = [row for row in self.rows if "error" not in row or Key.of(row) not in again]
            if len(kept) < len(self.rows):
                self.replace(kept)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @property
    def done(self) -> set[Key]:
        return set(map(Key.of, self.rows))

    def append(self, row: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a row that was timed in an environment, and waits until it is on disk."""
        name, earlier = short_digest(environment)[:ENVIRONMENT_DIGITS], self.manifest["environments"]
        if name not in earlier:
            self._write({**self.manifest, "environments": {**earlier, name: dict(environment)}})
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
        """Writes all rows anew."""
        write_whole(self.items, "".join(map(line_of, rows)))
        self.rows = rows

    def sort(self, keys: Sequence[Key]) -> None:
        """Brings the rows with these keys into their order, after the others."""
        place = {key: number for number, key in enumerate(keys)}
        self.replace(sorted(self.rows, key=lambda row: place.get(Key.of(row), -1)))

    def _write(self, manifest: Manifest) -> None:
        self.manifest = manifest
        write_whole(self.path / MANIFEST, text_of(manifest))


def line_of(row: Mapping[str, Any]) -> str:
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


def check_contents(
    rows: Sequence[Mapping[str, Any]], place: str, digests: dict[tuple[str, str], str], other_place: str
) -> None:
    """Raises an error for a row whose item has another digest in `digests`, which takes the other rows'."""
    for row in rows:
        item = row["dataset"], row["item"]
        if digests.setdefault(item, row["content"]) != row["content"]:
            raise ValueError(
                f"{place} holds results of an item {row['item']} of {row['dataset']} whose content is not "
                f"that of the item {other_place}. Results of other items need folders of their own"
            )


def drop_incomplete_line(path: Path) -> None:
    """Truncates a last line that a crash left incomplete."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
            os.fsync(file.fileno())
