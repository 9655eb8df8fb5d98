"""Checks of setting values; errors name the setting."""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

COUNT_LIMIT = 1 << 31
SEED_LIMIT = 1 << 63
Entry = TypeVar("Entry")


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


def whole(value: object, what: str, low: int, below: int = COUNT_LIMIT) -> int:
    """A whole number from `low` to `below` - 1."""
    if isinstance(value, bool):
        raise TypeError(f"{what} must be a whole number, not {value!r}")
    try:
        converted = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be a whole number, not {value!r}") from None
    if not low <= converted < below:
        raise ValueError(f"{what} must be from {low} to {below - 1}, not {converted}")
    return converted


def share(value: object, what: str) -> float:
    """A number from 0 to 1."""
    converted = number(value, what)
    if not 0.0 <= converted <= 1.0:
        raise ValueError(f"{what} must be from 0 to 1, not {converted}")
    return converted


def truth(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {value!r}")
    return value


def a_list(value: object, what: str, example: str) -> None:
    """TypeError for one text or number in place of a list; None may be a default."""
    if value is not None and (isinstance(value, str | bytes) or not isinstance(value, Collection)):
        raise TypeError(f"{what} must be a list such as {example}, not {value!r}")


def keep(value: object, what: str) -> float:
    """The share of the prompt that a stage keeps."""
    converted = number(value, what)
    if not 0.0 < converted <= 1.0:
        raise ValueError(f"{what} must be above 0 and at most 1, not {converted}")
    return converted


def choice(value: object, what: str, choices: Sequence[str]) -> str:
    """The value, which must be one of `choices`."""
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {value!r}")
    if value not in choices:
        raise ValueError(f"{what} must be {', '.join(choices[:-1])} or {choices[-1]}, not {value!r}")
    return value


def hint(name: str, names: Collection[str]) -> str:
    """The end of an error about an unknown name: the most similar of `names`, or all of them."""
    close = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}"


def known_names(names: Iterable[str], fields: Collection[str], what: str) -> None:
    """ValueError for a name of a field that `what` does not have."""
    for name in names:
        if name not in fields:
            raise ValueError(f"{what} has no field {name!r}; its fields are {', '.join(fields)}")


def entry(name: object, table: Mapping[str, Entry], what: str) -> Entry:
    """The entry of that name; a ValueError suggests similar names."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a {what} must be a string, not {name!r}")
    if name in table:
        return table[name]
    raise ValueError(f"there is no {what} {name!r}; {hint(name, table)}")
