"""Schedules for a wished speedup: the layers of their stages, and how their keeps relate."""

from collections.abc import Iterable, Mapping, Sequence

from lazyllm.checkpoints.config import ModelConfig

Shapes = Sequence[tuple[Mapping[float, float], float]]
"""Keeps by depth, relative to the first stage's, and the least keep of the first stage with which a shape is
taken; in the order in which they are tried."""
SPEEDUP_SHAPES: Shapes = (({0.23: 1, 0.50: 0.85, 0.63: 0.72}, 0.05), ({0.13: 1, 0.23: 0.45, 0.50: 0.38, 0.63: 0.32}, 0))
SHAPE_LENGTH = 2048  # tokens with which a shape is chosen: the layers do not depend on the prompt


class OutOfReach(ValueError):
    """A speedup that no keeps reach."""


def seeing_layers(config: ModelConfig, top: int) -> list[int]:
    """The layers up to `top` that see the whole context, or all of them if none does."""
    layers = range(top + 1)
    return [layer for layer in layers if not config.windows[layer]] or list(layers)


def placed(shape: Mapping[float, float], config: ModelConfig) -> dict[int, float]:
    """Each keep by the nearest layer that sees the whole context, above those taken before; if none is left,
    by the last such layer."""
    keeps: dict[int, float] = {}
    layers = seeing_layers(config, config.n_layers - 2)
    for wanted, keep in {round(depth * config.n_layers): keep for depth, keep in shape.items()}.items():
        free = [layer for layer in layers if layer > max(keeps, default=-1)] or layers[-1:]
        keeps[min(free, key=lambda layer: abs(layer - wanted))] = keep
    return keeps


def shape(share: float, speedup: float, further: Iterable[tuple[float, float]]) -> dict[float, float]:
    """Keeps by depth, relative to the first stage's, below which layers take `share` of the work that a
    speedup leaves.

    Each `further` stage is a rise and a fall: how far up it is between the stage before and the top, and the
    ratio of its keep to that before. So keeps never rise.
    """
    depth, keep = share / speedup, 1.0
    keeps = {depth: keep}
    for rise, fall in further:
        depth += rise * (1 - depth)
        keep *= fall
        keeps[depth] = keep
    return keeps
