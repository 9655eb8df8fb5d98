"""JSON from users and files, parsed with errors that name where it was read; and the digest of plain data."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any


def parse_json(text: str | bytes, where: object, strict: bool = False) -> Any:
    """The value of UTF-8 JSON. `strict` refuses keys that appear twice in an object, NaN and Infinity."""
    hooks: dict[str, Any] = {"object_pairs_hook": _unique_keys, "parse_constant": _refuse_constant}
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(text, **hooks) if strict else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def parse_object(text: str | bytes, where: object, strict: bool = False) -> dict[str, Any]:
    """Like `parse_json`, for a JSON object; any other value is an error."""
    value = parse_json(text, where, strict)
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__}; expected a JSON object")
    return value


def json_digest(value: Any) -> str:
    """SHA-256 of plain data as JSON, whatever the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice!r} appears twice; each key may appear once")
    return table


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
