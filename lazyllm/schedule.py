"""Schedules for a wished speedup: the layers of the stages, and their keeps by the prompt's length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.support import checked

Keeps = Mapping[int, float]
"""Keeps by layer."""
Shapes = Sequence[tuple[Mapping[float, float], float]]
"""Keeps by depth, relative to the first stage's, and the least keep of the first stage with which a shape is
taken; in the order in which they are tried."""
SPEEDUP_SHAPES: Shapes = (
    ({0.23: 1, 0.50: 0.85, 0.63: 0.72}, 0.05),
    ({0.10: 1, 0.25: 0.4, 0.40: 0.16}, 0.0),
)
SHAPE_LENGTH = 2048  # tokens with which a shape is chosen: the layers do not depend on the prompt
LEAST_KEEP, KEEP_DIGITS, PRECISION = 1e-5, 5, 1e-5


class Counted(Protocol):
    """A schedule whose work is counted."""

    def speedup(self, config: ModelConfig, n_prompt: int) -> float: ...


Schedule = TypeVar("Schedule", bound=Counted)


class OutOfReach(ValueError):
    """A speedup that no keeps reach."""


def schedule_for(
    target: float,
    config: ModelConfig,
    n_prompt: int,
    shapes: Shapes,
    pruning_of: Callable[[Keeps], Schedule],
) -> Schedule:
    """`pruning_of` the largest keeps that reach a counted speedup, in the first of these shapes that fits, or
    in the last one."""
    target = checked.number(target, "the speedup")
    if target <= 1.0:
        raise ValueError(f"the speedup must be above 1, which is dense, not {target:g}")
    if config.n_layers < 2:
        raise ValueError("the model has one layer, so no stage fits below the last one")
    seeing = seeing_layers(config, config.n_layers - 2)

    def scaled(keeps: Keeps, factor: float) -> Schedule:
        shares = {layer: round(factor * keep, KEEP_DIGITS) for layer, keep in keeps.items()}
        return pruning_of({layer: min(max(share, LEAST_KEEP), 1.0) for layer, share in shares.items()})

    for shape, least in shapes:
        keeps = _placed({round(depth * config.n_layers): keep for depth, keep in shape.items()}, seeing)
        if scaled(keeps, least).speedup(config, SHAPE_LENGTH) >= target:
            break

    best = scaled(keeps, 0.0)
    if (reach := best.speedup(config, n_prompt)) < target:
        raise OutOfReach(
            f"a speedup of {target:g} is out of reach: stages at layers {', '.join(map(str, keeps))} of "
            f"{config.n_layers} give at most {reach:.2f} at {n_prompt} prompt tokens"
        )
    low, high = 0.0, 1 / min(keeps.values())
    while high - low > PRECISION:
        factor = (low + high) / 2
        candidate = scaled(keeps, factor)
        if candidate.speedup(config, n_prompt) >= target:
            low, best = factor, candidate
        else:
            high = factor
    return best


def seeing_layers(config: ModelConfig, top: int) -> list[int]:
    """The layers up to `top` that see the whole context, or all of them if none does."""
    layers = range(top + 1)
    return [layer for layer in layers if not config.windows[layer]] or list(layers)


def _placed(keeps: Keeps, layers: list[int]) -> dict[int, float]:
    """Each keep by the nearest of `layers` above those taken before; if none is left, by the last layer."""
    placed: dict[int, float] = {}
    for wanted, keep in keeps.items():
        free = [layer for layer in layers if layer > max(placed, default=-1)] or layers[-1:]
        placed[min(free, key=lambda layer: abs(layer - wanted))] = keep
    return placed
