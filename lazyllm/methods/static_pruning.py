"""StaticPruning: one choice of tokens, made early and for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lazyllm.pruning import LAYER_LIMIT, Counted, Drop, Pruning
from lazyllm.support import checked

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig


@dataclass(frozen=True)
class StaticPruning(Counted):
    """Runs the first `layers` layers densely, then keeps `ceil(keep * n)` prompt tokens for good.

    A token's score is the query token's attention to it, averaged over those layers and all heads. Dropped
    tokens leave every cache and never come back.
    """

    name: ClassVar[str] = "static"
    layers: int
    keep: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", checked.whole(self.layers, "layers", 1, LAYER_LIMIT))
        object.__setattr__(self, "keep", checked.keep(self.keep, "keep"))

    def _stage(self) -> Pruning:
        return Pruning({self.layers - 1: Drop(self.keep)}, decode={})

    def check(self, config: ModelConfig) -> None:
        if self.layers >= config.n_layers:
            raise ValueError(
                f"layers must be below {config.n_layers}, the number of the model's layers, not {self.layers}"
            )

    def core(self) -> dict[str, Any]:
        return {**self._stage().core(), "average": True}

    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        """Counted operations of a prefill, as `Pruning.flops` counts, with the scores of all `layers`."""
        self.check(config)
        return self._stage().flops(config, n_prompt) + self._more_scores(config, n_prompt)

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        return self._stage().pass_flops(config, last_pass) + self._more_scores(config, int(last_pass[0][0]))

    def _more_scores(self, config: ModelConfig, in_play: int) -> int:
        """Operations of the scores below the stage's own layer."""
        return (self.layers - 1) * in_play * 2 * config.n_heads * config.head_dim
