"""CLAA: one choice of tokens by the attention of several layers and all key-value heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lazyllm.methods.fastkv import NEIGHBOURS, ROWS, FastKV
from lazyllm.policy import Policy, View
from lazyllm.pruning import Pruning
from lazyllm.support.pooling import pooled

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig

LAYERS = 4


@dataclass(frozen=True)
class CLAA(FastKV):
    """Cross-Layer Attention Aggregation (McDanel et al. 2026), without compression of the KV cache.

    As FastKV, but a token's score is its largest standardised one over `layer`, the three layers below it and
    all key-value heads.
    """

    name: ClassVar[str] = "claa"

    def stage(self) -> Pruning:
        return EveryLayer({self.layer: self.keep}, queries=ROWS, layers=LAYERS, window=ROWS, decode="frozen")

    def core(self) -> dict[str, Any]:
        return Aggregation({self.layer: self.keep}, window=ROWS, decode="frozen").core()


class EveryLayer(Pruning):
    """Counts the scores of all `layers`, those that see less than the stage's own among them."""

    def _scores(self, config: ModelConfig, layer: int, stage: int) -> bool:
        return layer <= stage < layer + self.layers


class Aggregation(Policy):
    """CLAA's scores."""

    layers = LAYERS

    def observe(self, view: View) -> np.ndarray:
        """The largest standardised score over key-value heads (m,); 0 for tokens that cannot be dropped."""
        free = ~view.protected
        rows = view.attention(ROWS)
        by_head = rows.reshape(len(view.keys()), -1, free.size).mean(axis=1)
        heads = pooled(by_head[:, free], NEIGHBOURS)
        spread = heads.std(axis=1, keepdims=True)
        heads -= heads.mean(axis=1, keepdims=True)
        np.divide(heads, spread, out=heads, where=spread > 0)
        scores = np.zeros(free.size, np.float32)
        scores[free] = heads.max(axis=0)
        return scores

    def score(self, view: View) -> np.ndarray:
        largest: np.ndarray = np.max([*view.observed.values(), self.observe(view)], axis=0)
        return largest
