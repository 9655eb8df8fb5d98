"""OneStage: a rival that chooses tokens once, after one layer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lazyllm.methods.rival import Rival
from lazyllm.pruning import DENSE, LAYER_LIMIT, Pruning
from lazyllm.support import checked

if TYPE_CHECKING:
    import numpy as np

    from lazyllm.checkpoints.config import ModelConfig


@dataclass(frozen=True)
class OneStage(Rival):
    """Keeps `ceil(keep * n)` prompt tokens after `layer`, which counts from 0."""

    layer: int
    keep: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", checked.whole(self.layer, "layer", 0, LAYER_LIMIT))
        object.__setattr__(self, "keep", checked.keep(self.keep, "keep"))

    @abstractmethod
    def stage(self) -> Pruning:
        """The schedule of the pass that chooses, with the options that its counted work depends on."""

    def check(self, config: ModelConfig) -> None:
        if self.layer >= config.n_layers - 1:
            raise ValueError(
                f"layer must be below {config.n_layers - 1} in a model of {config.n_layers} layers, "
                f"not {self.layer}"
            )

    def core(self) -> dict[str, Any]:
        return self.stage().core()

    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        """Counted operations of a prefill, as `Pruning.flops` counts, scores included."""
        self.check(config)
        return self.stage().flops(config, n_prompt)

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        return self.stage().prefill_flops(config, n_prompt, last_pass)

    def speedup(self, config: ModelConfig, n_prompt: int) -> float:
        """Dense prefill's counted operations over those of this method."""
        return DENSE.flops(config, n_prompt) / self.flops(config, n_prompt)
