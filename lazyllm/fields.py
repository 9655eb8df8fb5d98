"""Fields of a checkpoint's JSON files, read with their bounds checked."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from lazyllm.errors import CheckpointError

JSON_LIMIT = 256 << 20


def read_json(path: Path, unique_keys: bool = False) -> dict[str, Any]:
    """The object in the file `path`."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a Hugging Face model folder has it")
    if path.stat().st_size > JSON_LIMIT:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes; expected at most {JSON_LIMIT}")
    return parse_json(path, path.read_bytes(), unique_keys)


def parse_json(path: Path, text: bytes, unique_keys: bool) -> dict[str, Any]:
    """The object in `text`, read from `path`; with `unique_keys`, a key that comes twice is refused."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if unique_keys and len(found) != len(items):
            twice, _ = Counter(name for name, _ in items).most_common(1)[0]
            raise CheckpointError(f"{path}: {twice!r} appears twice; each key may appear once")
        return found

    try:
        contents = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} does not hold JSON: {error}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__}; expected a JSON object")
    return contents


def shortened(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python writes no whole number of thousands of digits
        return "a number of thousands of digits"


class Fields:
    """Typed look-ups in an object from a file; a missing or null field takes the default, or is an error."""

    def __init__(self, source: str | Path, values: dict[str, Any], prefix: str = ""):
        self.source = source
        self.values = values
        self.prefix = prefix

    def refuse(self, name: str, expected: str) -> NoReturn:
        value = self.values.get(self.prefix + name)
        shown = "missing" if value is None else shortened(value)
        raise CheckpointError(f"{self.source}: {self.prefix}{name} is {shown}; expected {expected}")

    def get(self, name: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + name)
        return default if value is None else value

    def whole(self, name: str, most: int, default: int | None = None, least: int = 1) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.refuse(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A number above `low`, at most `high`."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            self.refuse(name, f"a number above {low:g} and at most {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            self.refuse(name, "a string")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, "an object")
        return value
