"""Stages: the layers after which prompt tokens are dropped, and the rule of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from lazyllm.support import checked

LAYER_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class Mass:
    """A stage's rule: keep the best tokens until they hold the share `mass` of all prompt tokens' scores, at
    least `keep_min` and at most `keep_max` of the prompt."""

    mass: float
    keep_min: float = 0.0
    keep_max: float = 1.0

    def __post_init__(self) -> None:
        for name, check in ("mass", checked.keep), ("keep_max", checked.keep), ("keep_min", checked.number):
            object.__setattr__(self, name, check(getattr(self, name), f"Mass {name}"))
        if not 0.0 <= self.keep_min <= self.keep_max:
            raise ValueError(f"Mass keep_min must be from 0 to keep_max={self.keep_max}, not {self.keep_min}")

    def __repr__(self) -> str:
        bounds = [f"keep_min={self.keep_min!r}"] if self.keep_min != 0.0 else []
        bounds += [f"keep_max={self.keep_max!r}"] if self.keep_max != 1.0 else []
        return f"Mass({', '.join([f'{self.mass!r}', *bounds])})"


@dataclass(frozen=True, slots=True)
class Drop:
    """A stage's rule: the share `keep` of the prompt stays; what is dropped is gone for good, from every
    layer of all later passes."""

    keep: float

    def __post_init__(self) -> None:
        if isinstance(self.keep, Mass):
            raise TypeError(
                f"Drop takes a keep, not {self.keep}: each decode step would drop part of what is left"
            )
        object.__setattr__(self, "keep", checked.keep(self.keep, "Drop keep"))

    def __repr__(self) -> str:
        return f"Drop({self.keep!r})"


Rule = float | Mass | Drop
Stages = tuple[tuple[int, Rule], ...]
StagesInput = Mapping[Any, Any] | Sequence[Any] | None


def largest_keep(rule: Rule) -> float:
    """The largest share of the prompt that a stage keeps."""
    if isinstance(rule, float):
        return rule
    return rule.keep_max if isinstance(rule, Mass) else rule.keep


def checked_stages(value: StagesInput, what: str) -> Stages:
    """The stages as pairs. A mapping may name its layers in any order; a list must be in ascending order."""
    if isinstance(value, Mapping):
        stages = sorted(((_layer(layer), rule) for layer, rule in value.items()), key=lambda stage: stage[0])
    else:
        form = "a mapping or a list of (layer, keep) pairs"
        pairs = checked_pairs(() if value is None else value, what, form)
        stages = [(_layer(layer), rule) for layer, rule in pairs]
    stages = [(layer, _rule(rule, layer)) for layer, rule in stages]
    for (last, _), (layer, _) in pairwise(stages):
        if layer <= last:
            raise ValueError(f"{what}: layers must rise strictly, but layer {layer} follows layer {last}")
    keeps = [(layer, largest_keep(rule)) for layer, rule in stages if not isinstance(rule, Mass)]
    for (_, more), (layer, keep) in pairwise(keeps):
        if keep > more:
            raise ValueError(f"{what}: keeps must not rise, but layer {layer} keeps {keep} after {more}")
    return tuple(stages)


def checked_pairs(value: object, what: str, form: str) -> list[Sequence[Any]]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{what} must be {form}, not {value!r}")
    pairs = list(value)
    for pair in pairs:
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"{what} must be {form}, but has {pair!r}")
    return pairs


def _layer(value: object) -> int:
    if isinstance(value, str):
        if not (value.isascii() and value.isdecimal()):
            raise ValueError(f"a stage's layer must be a whole number, not {value!r}")
        value = int(value)
    return checked.whole(value, "a stage's layer", 0, LAYER_LIMIT)


def _rule(value: object, layer: int) -> Rule:
    if isinstance(value, Mass | Drop):
        return value
    if isinstance(value, Mapping):
        if set(value) == {"drop"}:
            return Drop(value["drop"])
        if "mass" not in value or not set(value) <= {field.name for field in fields(Mass)}:
            raise ValueError(
                f"the stage at layer {layer} must be a keep, or have drop, or mass, keep_min, keep_max, "
                f"not {value!r}"
            )
        return Mass(**value)
    return checked.keep(value, f"keep of the stage at layer {layer}")


def plain_stages(stages: Stages) -> dict[str, Any]:
    """The stages as JSON has them: {"7": {"drop": 0.4}, "15": 0.3}."""

    def plain(rule: Rule) -> Any:
        if isinstance(rule, Mass):
            return asdict(rule)
        return {"drop": rule.keep} if isinstance(rule, Drop) else rule

    return {str(layer): plain(rule) for layer, rule in stages}


def core_stages(stages: Stages) -> list[tuple[Any, ...]]:
    """(layer, keep), (layer, (mass, keep_min, keep_max)), or for Drop (layer, keep, True)."""

    def core(rule: Rule) -> tuple[Any, ...]:
        if isinstance(rule, Mass):
            return ((rule.mass, rule.keep_min, rule.keep_max),)
        return (rule.keep, True) if isinstance(rule, Drop) else (rule,)

    return [(layer, *core(rule)) for layer, rule in stages]
