"""Space: the settings of a sweep, as a list or as axes whose product is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import product
from typing import Any, TypeAlias

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.evaluation.runner import Settings, checked_settings, has_names
from lazyllm.evaluation.summary import DENSE_LABEL
from lazyllm.method import Method
from lazyllm.pruning import Pruning
from lazyllm.scoring import Scoring

SCORING = {field.name for field in fields(Scoring)}
AXES = {"layer", "keep", *SCORING, *(field.name for field in fields(Pruning))}

Space: TypeAlias = Mapping[str, Iterable[Any]] | Settings


def settings_of(space: Space, config: ModelConfig) -> dict[str, Method]:
    """Methods by name, dense first. A setting that the model cannot run is an error."""
    named = has_names(space) and not AXES & space.keys()
    chosen = combined(space) if isinstance(space, Mapping) and not named else space
    settings = {DENSE_LABEL: Pruning(), **checked_settings(chosen)}
    if len(settings) == 1:
        raise ValueError("the space holds dense alone, which every sweep measures; give settings to compare")
    for method in settings.values():
        method.check(config)
    return settings


def combined(axes: Mapping[str, Any]) -> list[Pruning]:
    """The product of the axes. An axis is a field of Pruning or of Scoring; `layer` and `keep` are a single
    stage's."""
    for name, axis in axes.items():
        if isinstance(axis, str | bytes | Mapping) or not isinstance(axis, Iterable):
            raise TypeError(f"{name} must be a list of values to try, such as [{axis!r}], not {axis!r}")
    single = "keep" in axes and "layer" in axes
    if ("stages" in axes) == single:
        raise ValueError(
            'the space needs either "stages" or both "layer" and "keep" (one stage, at each layer with each '
            f"keep); it has {', '.join(axes) or 'nothing'}"
        )
    settings = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    for setting in settings:
        if single:
            setting["stages"] = {setting.pop("layer"): setting.pop("keep")}
        if scoring := {name: setting.pop(name) for name in SCORING & setting.keys()}:
            setting["scoring"] = replace(Scoring.from_fields(setting.get("scoring", {})), **scoring)
    return [Pruning.from_fields(setting) for setting in settings]
