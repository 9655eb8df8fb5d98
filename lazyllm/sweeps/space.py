"""Space: the settings of a sweep, as a list or as axes whose product is taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import product
from typing import Any

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.evaluation.runner import checked_settings
from lazyllm.evaluation.summary import DENSE_LABEL
from lazyllm.method import Method
from lazyllm.methods import PruningInput
from lazyllm.pruning import Pruning

Settings = Mapping[str, Iterable[Any]] | Sequence[PruningInput] | PruningInput
AXES = (*(field.name for field in fields(Pruning)), "keep")


def settings_of(space: Settings, config: ModelConfig) -> dict[str, Method]:
    """Methods by label, dense first. A setting that the model cannot run is an error."""
    settings = {
        DENSE_LABEL: Pruning(),
        **checked_settings(combined(space) if isinstance(space, Mapping) else space),
    }
    if len(settings) == 1:
        raise ValueError("the space holds dense alone, which every sweep measures; give settings to compare")
    for method in settings.values():
        method.check(config)
    return settings


def combined(axes: Mapping[str, Iterable[Any]]) -> list[PruningInput]:
    """The product of the axes. An axis is a field of Pruning; with `keep`, `layers` is a single stage's."""
    for name in axes:
        if name not in AXES:
            close = get_close_matches(str(name), AXES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"an axis is one of {', '.join(AXES)}"
            raise ValueError(f"the space has no axis {name!r}; {hint}")
    if ("stages" in axes) == ("keep" in axes) or ("keep" in axes and "layers" not in axes):
        raise ValueError(
            'the space needs either "stages" or both "layers" and "keep" (one stage, at each layer with each '
            f"keep); it has {', '.join(axes) or 'nothing'}"
        )
    values = [values_of(name, axis) for name, axis in axes.items()]
    settings = [dict(zip(axes, chosen, strict=True)) for chosen in product(*values)]
    if "keep" in axes:
        for options in settings:
            options["stages"] = {options.pop("layers"): options.pop("keep")}
    return [Pruning(**options) for options in settings]


def values_of(name: str, axis: object) -> list[Any]:
    """The checked values of an axis."""
    if isinstance(axis, str | bytes | Mapping) or not isinstance(axis, Iterable):
        raise TypeError(f"{name} must be a list of values to try, such as [{axis!r}], not {axis!r}")
    values = list(axis)
    if not values:
        raise ValueError(f"{name} has no value to try")
    if name == "stages" and not all(values):
        raise ValueError("stages has an empty value; dense is measured beside every space")
    return values
