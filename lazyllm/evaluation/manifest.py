"""The manifest of a run: conditions that all rows share, environments, and how items were selected.

{"format": 2, "model": name, "conditions": {…}, "environments": {id: {…}}, "selections": [{…}, …]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazyllm.support.json_text import parse_object

FORMAT, FORMER = 2, 1
MANIFEST = "manifest.json"
SCORE = "score"  # the measure of a run that generates answers and scores them
ONLY = ""  # the environment of rows that name none
FORMER_ENVIRONMENT = ("machine", "device", "threads", "warm-up runs")

Manifest = dict[str, Any]


def new_manifest(model: str, conditions: Mapping[str, Any], selection: Mapping[str, Any]) -> Manifest:
    made = {
        "format": FORMAT,
        "model": model,
        "conditions": conditions,
        "environments": {},
        "selections": [selection],
    }
    return parse_object(text_of(made), "the manifest")  # as plain as one that was read


def read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no run: there is no {MANIFEST}")
    read = parse_object(file.read_bytes(), file)
    if read.get("format") == FORMER:
        return from_former(read)
    if read.get("format") != FORMAT:
        raise ValueError(f"{file} is no manifest of format {FORMAT}; its format is {read.get('format')!r}")
    return read


def from_former(read: Mapping[str, Any]) -> Manifest:
    """Fields that reports need of a manifest of format 1, whose rows were all timed in one environment."""
    known = {*FORMER_ENVIRONMENT, "format", "model", "methods", "settings"}
    kept = {name: value for name, value in read.items() if name not in known}
    settings = read.get("methods") or dict.fromkeys(read["settings"])
    return {
        "format": FORMER,
        "model": read["model"],
        "conditions": {"measure": SCORE, "settings": settings, **kept},
        "environments": {ONLY: {name: read[name] for name in FORMER_ENVIRONMENT if name in read}},
        "selections": [],
    }


def text_of(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"


def joined(one: Manifest, other: Manifest, where: str, there: str) -> Manifest:
    """Both in one; an error that names what differs if their rows cannot be compared. `where` holds `one`,
    and `there` is what has `other`."""
    for manifest, place in ((one, where), (other, there)):
        if manifest["format"] == FORMER:
            raise ValueError(
                f"{place} holds a run of format {FORMER}, of an earlier lazyllm: it can be reported, but not "
                "continued or merged. Give another folder"
            )
    mine, theirs = one["conditions"], other["conditions"]
    if told := differences(mine, theirs):
        raise ValueError(
            f"{where} holds a run under other conditions than {there}: {told}. Results that cannot be "
            "compared need folders of their own"
        )
    selections = [*one["selections"]]
    selections += [each for each in other["selections"] if each not in selections]
    return {
        **one,
        "conditions": {name: union(mine.get(name), theirs.get(name)) for name in {**mine, **theirs}},
        "environments": {**one["environments"], **other["environments"]},
        "selections": selections,
    }


def union(one: Any, other: Any) -> Any:
    return {**one, **other} if isinstance(one, dict) else one


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The conditions that differ, as text."""
    several = (difference(name, one.get(name), other.get(name)) for name in {**one, **other})
    return "; ".join(filter(None, several))


def difference(name: str, one: Any, other: Any) -> str:
    """The differences within one condition, as text; of two mappings only common keys are compared."""
    if isinstance(one, dict) and isinstance(other, dict):
        several = (difference(f"{name}, {key}", one[key], other[key]) for key in one if key in other)
        return "; ".join(filter(None, several))
    return "" if one == other else f"{name} is {shown(one)}, not {shown(other)}"


def shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:157]}..."
