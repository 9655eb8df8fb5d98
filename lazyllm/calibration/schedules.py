"""Schedules for a wished counted speedup, by where the first stage stands; all with their scores' work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.pruning import Pruning

SHARES = (0.45, 0.55, 0.65, 0.75)
"""Shares that layers below the first stage take of the work that a speedup leaves, in the schedules tried."""
FURTHER = ((0.35, 0.85), (0.26, 0.72 / 0.85))
"""The rise and the fall of their second and third stage, near those of the first of SPEEDUP_SHAPES."""


def shape(share: float, speedup: float, further: Iterable[tuple[float, float]]) -> dict[float, float]:
    """Keeps by depth, relative to the first stage's, below which layers take `share` of the work left.

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


def candidates(speedup: float, config: ModelConfig, n_prompt: int) -> Iterator[Pruning]:
    """The schedules that a calibration tries; an error if even the first, `for_speedup`, is out of reach."""
    yield Pruning.for_speedup(speedup, config, n_prompt)
    for share in SHARES:
        with suppress(ValueError):  # out of reach
            shapes = [(shape(share, speedup, FURTHER), 0.0)]
            yield Pruning.for_speedup(speedup, config, n_prompt, shapes=shapes)
