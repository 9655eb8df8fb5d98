"""JSON from users and files, parsed with errors that name where it was read; and the digest of plain data."""

import hashlib
import json
from typing import Any


def parse_json(text: str | bytes, where: object) -> Any:
    """The value of UTF-8 JSON, in which each key of an object appears once."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def parse_object(text: str | bytes, where: object) -> dict[str, Any]:
    """Like `parse_json`, for a JSON object; any other value is an error."""
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__}; expected a JSON object")
    return value


def json_digest(value: Any) -> str:
    """SHA-256 of plain data as JSON, whatever the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"{key!r} appears twice; each key may appear once")
        table[key] = value
    return table
