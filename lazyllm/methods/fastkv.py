"""FastKV: the tokens that one middle layer attends to go on to the layers above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lazyllm.methods.one_stage import OneStage
from lazyllm.pruning import Pruning

if TYPE_CHECKING:
    import numpy as np

    from lazyllm.checkpoints.config import ModelConfig

ROWS = 8  # the last queries, which score; their tokens always stay
NEIGHBOURS = 7


@dataclass(frozen=True)
class FastKV(OneStage):
    """FastKV's token-selective propagation (Jo et al. 2025), without its compression of the KV cache.

    After `layer`, the `ceil(keep * n)` prompt tokens that the last 8 attend to most go on; those 8 are among
    them. Layers up to `layer` keep all keys and values; answers bring nothing back.
    """

    name: ClassVar[str] = "fastkv"

    def stage(self) -> Pruning:
        """The schedule, with the options that its counted work depends on."""
        return Pruning({self.layer: self.keep}, queries=ROWS, smooth=NEIGHBOURS, window=ROWS, decode="frozen")

    def core(self) -> dict[str, Any]:
        return self.stage().core()

    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        """Counted operations of a prefill, as `Pruning.flops` counts, scores included."""
        self.check(config)
        return self.stage().flops(config, n_prompt)

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        return self.stage().prefill_flops(config, n_prompt, last_pass)
