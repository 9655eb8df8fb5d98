"""Schedules for a wished speedup: the layers of their stages, and how their keeps relate."""

from collections.abc import Iterable, Mapping, Sequence

from lazyllm.checkpoints.config import ModelConfig

Shapes = Sequence[tuple[Mapping[float, float], float]]
"""Shapes in the order in which they are tried: keeps by depth, relative to the first stage's, and the least keep
of the first stage with which the shape is taken."""
SPEEDUP_SHAPES: Shapes = (({0.23: 1, 0.50: 0.85, 0.63: 0.72}, 0.05), ({0.13: 1, 0.23: 0.45, 0.50: 0.38, 0.63: 0.32}, 0))
PROBED_ABOVE = 2.2
"""Above this speedup there is one stage more, the first: at the model's induction head, if it has one, by which it
is scored."""
KEEPS_ABOVE_HEAD = {0.23: 0.7, 0.50: 0.6, 0.63: 0.5}
SHAPE_LENGTH = 2048  # tokens with which a shape is chosen: the layers do not depend on the prompt


class OutOfReach(ValueError):
    """Raised for a speedup that no keeps reach."""


def seeing_layers(config: ModelConfig, top: int) -> list[int]:
    """The layers up to `top` that see the whole context, or all of them if none does."""
    layers = range(top + 1)
    return [layer for layer in layers if not config.windows[layer]] or list(layers)


def placed(shape: Mapping[float, float], config: ModelConfig) -> dict[int, float]:
    """The keeps of a shape by layer: each at the nearest layer that sees the whole context and is above the
    stages before, or at the last layer that sees it if there is none above."""
    keeps: dict[int, float] = {}
    layers = seeing_layers(config, config.n_layers - 2)
    for ideal, keep in {round(depth * config.n_layers): keep for depth, keep in shape.items()}.items():
        free = [layer for layer in layers if layer > max(keeps, default=-1)] or layers[-1:]
        keeps[min(free, key=lambda layer: abs(layer - ideal))] = keep
    return keeps


def first_stage(config: ModelConfig) -> int:
    """The layer of the first stage of a schedule without an induction head."""
    return next(iter(placed(SPEEDUP_SHAPES[0][0], config)))


def head_for(speedup: float, config: ModelConfig) -> tuple[int, int] | None:
    """The induction head at which a schedule for this speedup begins; None if it has none."""
    return config.induction_head if speedup > PROBED_ABOVE else None


def shapes_with(head: tuple[int, int] | None, config: ModelConfig) -> Shapes:
    """The shapes of schedules that are scored by this induction head, or by none."""
    return (({head[0] / config.n_layers: 1, **KEEPS_ABOVE_HEAD}, 0),) if head else SPEEDUP_SHAPES


def shape(share: float, speedup: float, further: Iterable[tuple[float, float]]) -> dict[float, float]:
    """Keeps by depth, relative to the first stage's. The layers below the first stage take `share` of the work
    that a speedup leaves.

    Each `further` stage is a rise (its place from 0, the stage before, to 1, the top) and a fall (its keep over
    that of the stage before). With a share of 0.5, speedup 2 and (1/3, 0.8) it is {0.25: 1, 0.5: 0.8}.
    """
    depth, keep = share / speedup, 1.0
    keeps = {depth: keep}
    for rise, fall in further:
        depth += rise * (1 - depth)
        keep *= fall
        keeps[depth] = keep
    return keeps
