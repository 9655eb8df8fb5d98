"""Parsing of the argument `pruning`: a method, its text, stages, a preset's file, or None for dense."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lazyllm.method import Method
from lazyllm.methods.compression import PromptCompression
from lazyllm.methods.preset import Preset
from lazyllm.methods.rivals import RIVALS
from lazyllm.methods.speedup import Speedup
from lazyllm.pruning import DENSE, Pruning
from lazyllm.support.json_text import parse_json

PruningInput = Method | float | str | Path | Mapping[Any, Any] | Sequence[Any] | None
BUILT_IN: dict[str, type[Method]] = {cls.name: cls for cls in (PromptCompression, *RIVALS, Speedup)}
ENTRY_POINTS = "lazyllm.methods"
"""The group of entry points by which installed packages offer classes of methods, each under its name."""
SPEEDUP = re.compile(r"(\d+\.?\d*)[xX]?")
LAYER_KEY = re.compile(r"([{,]\s*)(\d+)(\s*:)")  # as in Python, and as labels show stages: {10: 0.7}
FORMS = (
    "a speedup such as 2x, dense, random:keep=0.5,seed=0, static:layer=7,keep=0.5, compress:ratio=0.5, "
    "fastkv:layer=14,keep=0.2, claa:layer=14,keep=0.2, gemfilter:layer=12,keep=0.1, snapkv:keep=0.5, "
    'expected:keep=0.5, stages as JSON such as {"10": 0.7}, the file of a preset such as preset.json, or '
    "name:field=value of a method that an installed package offers"
)


def as_method(pruning: object) -> Method:
    """The method that `pruning` stands for: a method, a speedup, text, stages, fields, a file or None."""
    if pruning is None:
        return DENSE
    if isinstance(pruning, Method):
        return pruning
    if isinstance(pruning, int | float):
        return Speedup(pruning)
    if isinstance(pruning, Path):
        return Preset.load(pruning)
    if isinstance(pruning, str):
        return parse_method(pruning)
    if isinstance(pruning, Mapping) and "method" in pruning:
        if cls := method_class(str(pruning["method"])):
            return cls.from_fields(pruning)
        names = ", ".join(dict.fromkeys([*BUILT_IN, *sorted(entry_points(group=ENTRY_POINTS).names)]))
        raise ValueError(f"method is {pruning['method']!r}; it must be one of {names}")
    if isinstance(pruning, Mapping) and "policy" in pruning:
        raise ValueError(f"the policy {pruning['policy']} is code; give an instance of its class as pruning=")
    if isinstance(pruning, Mapping | list | tuple):
        return Pruning.from_fields(pruning)
    raise TypeError(
        "pruning must be a speedup such as 2.0, a lazyllm.Pruning, a method such as lazyllm.RandomDrop, "
        f"its text, stages such as {{10: 0.7}}, a preset's path, or None for dense, not {pruning!r}"
    )


def parse_method(text: str) -> Method:
    """A method from one argument: `2x`, `dense`, `random:keep=0.5`, stages as JSON, the text of `to_json`, or
    the file of a preset, whose name ends with .json. Installed packages may offer more (`ENTRY_POINTS`)."""
    text = text.strip()
    name, _, options = text.partition(":")
    if text.lower() in ("dense", "none", "null"):
        return DENSE
    if text[:1] in ("{", "["):
        return as_method(fields_in(text))
    if speedup := SPEEDUP.fullmatch(text):
        return Speedup(float(speedup[1]))
    if cls := method_class(name):
        return cls.from_fields(fields_of(options, text))
    if text.endswith(".json"):
        return Preset.load(text)
    raise ValueError(f"pruning is {text!r}; it must be {FORMS}")


def fields_in(text: str) -> Any:
    """The value of JSON, in which layers need no quotes."""
    try:
        return parse_json(text, "pruning")
    except ValueError:
        quoted = LAYER_KEY.sub(r'\1"\2"\3', text)
        if quoted == text:
            raise
        return parse_json(quoted, "pruning")


def method_class(name: str) -> type[Method] | None:
    """The class of that name, of this package or of an installed one, or None. Only the entry point of that name
    is loaded, so that a broken one affects no other method."""
    entries = [*entry_points(group=ENTRY_POINTS, name=name)]
    if not entries:
        return BUILT_IN.get(name)
    sources = [f"{entry.value} of {entry.dist.name if entry.dist else 'a package'}" for entry in entries]
    sources += ["lazyllm itself"] if name in BUILT_IN else []
    if len(sources) > 1:
        raise ValueError(f"the method {name!r} is in {', '.join(sources)}; uninstall all but one")
    try:
        cls = entries[0].load()
    except Exception as error:
        raise ValueError(f"the method {name!r} ({sources[0]}) cannot be loaded: {error!r}") from error
    if not (isinstance(cls, type) and issubclass(cls, Method) and cls.name == name):
        raise TypeError(f"{sources[0]} must be a lazyllm.Method with name = {name!r}, not {cls!r}")
    return cls


def fields_of(options: str, text: str) -> dict[str, Any]:
    """The fields of options such as `keep=0.5,seed=0`; `text` is the whole text, for errors."""
    values: dict[str, Any] = {}
    for part in options.split(",") if options else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not name or not equals or name in values:
            raise ValueError(f"{text!r} has {part!r}, where a new name=value is wanted; a method is {FORMS}")
        values[name] = value
        with suppress(ValueError):  # else it is text
            values[name] = json.loads(value)
    return values
