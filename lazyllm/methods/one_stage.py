"""OneStage: a rival that chooses tokens once, after one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazyllm.methods.rival import Rival
from lazyllm.pruning import LAYER_LIMIT, Counted
from lazyllm.support import checked

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig


@dataclass(frozen=True)
class OneStage(Rival, Counted):
    """Keeps `ceil(keep * n)` prompt tokens after `layer`, which counts from 0."""

    layer: int
    keep: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", checked.whole(self.layer, "layer", 0, LAYER_LIMIT))
        object.__setattr__(self, "keep", checked.keep(self.keep, "keep"))

    def check(self, config: ModelConfig) -> None:
        if self.layer >= config.n_layers - 1:
            raise ValueError(
                f"layer must be below {config.n_layers - 1} in a model of {config.n_layers} layers, "
                f"not {self.layer}"
            )
