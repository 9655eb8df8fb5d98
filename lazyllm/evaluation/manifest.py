"""The manifest of a run: conditions that all rows share, environments, and how items were selected.

{"format": 2, "model": name, "conditions": {…}, "environments": {id: {…}}, "selections": [{…}, …]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazyllm.support.json_text import parse_object

FORMAT = 2
MANIFEST = "manifest.json"
SCORE = "score"  # the measure of a run that generates answers and scores them

Manifest = dict[str, Any]


def new_manifest(model: str, conditions: Mapping[str, Any], selection: Mapping[str, Any]) -> Manifest:
    """A manifest; of `selection` it has what is not None."""
    manifest = {
        "format": FORMAT,
        "model": model,
        "conditions": conditions,
        "environments": {},
        "selections": [{name: value for name, value in selection.items() if value is not None}],
    }
    return parse_object(text_of(manifest), "the manifest")  # as plain as one that was read


def read_manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no run: there is no {MANIFEST}")
    manifest = parse_object(file.read_bytes(), file)
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{file} is no manifest of format {FORMAT}; its format is {manifest.get('format')!r}"
        )
    return manifest


def text_of(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"


def joined(first: Manifest, second: Manifest, place: str, other_place: str) -> Manifest:
    """Both in one; an error that names what differs if their rows cannot be compared."""
    ours, theirs = first["conditions"], second["conditions"]
    if differing := differences(ours, theirs):
        raise ValueError(
            f"{place} holds a run under other conditions than {other_place}: {differing}. Results that "
            "cannot be compared need folders of their own"
        )
    new = [selection for selection in second["selections"] if selection not in first["selections"]]
    return {
        **first,
        "conditions": {name: union(ours.get(name), theirs.get(name)) for name in {**ours, **theirs}},
        "environments": {**first["environments"], **second["environments"]},
        "selections": [*first["selections"], *new],
    }


def union(first: Any, second: Any) -> Any:
    return {**first, **second} if isinstance(first, dict) else first


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """The conditions that differ, as text."""
    texts = (difference(name, first.get(name), second.get(name)) for name in {**first, **second})
    return "; ".join(filter(None, texts))


def difference(name: str, first: Any, second: Any) -> str:
    """The differences within one condition, as text; of two mappings only common keys are compared."""
    if isinstance(first, dict) and isinstance(second, dict):
        texts = (difference(f"{name}, {key}", first[key], second[key]) for key in first if key in second)
        return "; ".join(filter(None, texts))
    return "" if first == second else f"{name} is {shown(first)}, not {shown(second)}"


def shown(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:157]}..."
