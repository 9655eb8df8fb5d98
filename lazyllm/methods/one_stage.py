"""OneStage: a rival that chooses tokens once, after one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazyllm.pruning import LAYER_LIMIT, Counted, Pruning
from lazyllm.support import checked

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig


@dataclass(frozen=True)
class OneStage(Counted):
    """Keeps `ceil(keep * n)` prompt tokens after `layer`, which counts from 0."""

    layer: int
    keep: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", checked.whole(self.layer, "layer", 0, LAYER_LIMIT))
        object.__setattr__(self, "keep", checked.keep(self.keep, "keep"))

    def check(self, config: ModelConfig) -> None:
        Pruning({self.layer: self.keep}).check(config)
