"""Fields of a checkpoint's JSON files, each checked against its bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from lazyllm.errors import CheckpointError
from lazyllm.support.json_text import parse_object

JSON_LIMIT = 32 << 20  # bytes; the largest known are indexes of 10 MiB


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file `path`."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a Hugging Face model folder has it")
    check_size(path, JSON_LIMIT)
    return json_object(path, path.read_bytes())


def check_size(path: Path, limit: int) -> None:
    """Raises CheckpointError for a file of more than `limit` bytes; a missing file passes."""
    if path.is_file() and (size := path.stat().st_size) > limit:
        raise CheckpointError(f"{path} has {size} bytes; expected at most {limit}")


def json_object(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object in `text`, which was read from `path`."""
    try:
        return parse_object(text, path)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def shortened(value: Any) -> str:
    return f"{value[:80] if isinstance(value, str | list) else value!r:.80}"


def optional_fields(path: Path) -> Fields:
    """The fields of a JSON file; none where the file is missing."""
    return Fields(path, read_json(path) if path.exists() else {})


class Fields:
    """Typed look-ups in an object from a file; a missing or null field takes the default, or is an error.

    `names` has the file's own names of fields, where they differ, as in GGUF files; errors use them.
    """

    def __init__(self, source: str | Path, values: dict[str, Any], names: Mapping[str, str] | None = None):
        self.source = source
        self.values = values
        self.names = names or {}

    def refuse(self, name: str, expected: str) -> NoReturn:
        value = self.values.get(name)
        shown = "missing" if value is None else shortened(value)
        raise CheckpointError(f"{self.source}: {self.names.get(name, name)} is {shown}; expected {expected}")

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, high: int, default: int | None = None, low: int = 1) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A number above `low`, at most `high`, or the default, which may be any number."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            self.refuse(name, f"a number above {low:g} and at most {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def only(self, name: str, value: Any, meaning: str) -> None:
        """Raises an error unless the field is `value` or missing; `meaning` says what other values mean."""
        if self.get(name, value) != value:
            expected = repr(value) if isinstance(value, str) else json.dumps(value)
            self.refuse(name, f"{expected}: {meaning} are not supported")

    def section(self, name: str) -> Fields:
        """The fields of the object in a field; none where it is missing."""
        values = self.get(name, {})
        if not isinstance(values, dict):
            self.refuse(name, "an object")
        return Fields(f"{self.source}: {name}", values, self.names)
