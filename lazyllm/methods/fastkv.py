"""FastKV: the tokens that one middle layer attends to go on to the layers above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lazyllm.methods.one_stage import OneStage
from lazyllm.pruning import Pruning

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
        return Pruning({self.layer: self.keep}, queries=ROWS, smooth=NEIGHBOURS, window=ROWS, decode="frozen")
