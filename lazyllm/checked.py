"""Values of settings, checked: what is refused is said with the setting's own name."""

from __future__ import annotations

import json
import math
import operator
from typing import Any

COUNT_LIMIT = 1 << 31


def number(value: object, what: str) -> float:
    """A finite number."""
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"{what} must be a number, not {value!r}")
    try:
        converted = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be a number, not {value!r}") from None
    except OverflowError:
        raise ValueError(f"{what} is too large") from None
    if not math.isfinite(converted):
        raise ValueError(f"{what} must be finite, not {converted}")
    return converted


def whole(value: object, what: str, least: int, below: int = COUNT_LIMIT) -> int:
    """A whole number from `least` to `below` - 1."""
    if isinstance(value, bool):
        raise TypeError(f"{what} must be a whole number, not {value!r}")
    try:
        converted = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be a whole number, not {value!r}") from None
    if not least <= converted < below:
        raise ValueError(f"{what} must be from {least} to {below - 1}, not {converted}")
    return converted


def keep(value: object, what: str) -> float:
    """A share of the prompt that goes on."""
    share = number(value, what)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{what} must be above 0 and at most 1, not {share}")
    return share


def parse_json(text: str, what: str = "pruning") -> Any:
    """JSON without keys that come twice and without NaN."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError(f"a key appears twice among {', '.join(key for key, _ in pairs)}")
    return table


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no value of a pruning")
