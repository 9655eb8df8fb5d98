"""Rivals of Pruning: the paper's baselines, and FastKV, CLAA and GemFilter, which choose tokens once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.counted_work import layer_flops, score_flops
from lazyllm.policy import Policy, View
from lazyllm.pruning import DENSE, LAYER_LIMIT, Drop, Pruning, Scheduled
from lazyllm.scoring import Scoring
from lazyllm.support import checked

ROWS = 8  # the last queries, which score in FastKV and CLAA; their tokens always stay
FASTKV_NEIGHBOURS, GEMFILTER_NEIGHBOURS = 7, 5
CLAA_LAYERS = 4


@dataclass(frozen=True, repr=False)
class RandomDrop(Scheduled):
    """Runs the model densely on `ceil(keep * N)` random tokens of the prompt, the last one always among them,
    at consecutive positions, or with `original_positions` at those in the prompt."""

    name: ClassVar[str] = "random"
    keep: float
    seed: int = 0
    original_positions: bool = False
    schedule = DENSE

    def __post_init__(self) -> None:
        seed = checked.whole(self.seed, "seed", 0, checked.SEED_LIMIT)
        self._set(keep=checked.keep(self.keep, "keep"), seed=seed)
        checked.truth(self.original_positions, "original_positions")

    def __repr__(self) -> str:
        places = ", original_positions=True" if self.original_positions else ""
        return f"RandomDrop(keep={self.keep!r}, seed={self.seed!r}{places})"

    def positions(self, n_prompt: int, turn: int = 0) -> np.ndarray:
        """Indices of the prompt's tokens that stay, ascending."""
        others = self.kept(n_prompt) - 1
        chosen = np.random.default_rng([self.seed, turn]).choice(n_prompt - 1, others, replace=False)
        return np.append(np.sort(chosen), n_prompt - 1)

    def kept(self, n_prompt: int) -> int:
        return math.ceil(self.keep * n_prompt)

    def ids(self, llm: Any, prompt_ids: list[int], turn: int) -> list[int]:
        if self.original_positions:
            return prompt_ids
        return [prompt_ids[i] for i in self.positions(len(prompt_ids), turn)]

    def gaps(self, n_prompt: int, turn: int) -> np.ndarray:
        if not self.original_positions:
            return super().gaps(n_prompt, turn)
        return np.setdiff1d(np.arange(n_prompt), self.positions(n_prompt, turn))


@dataclass(frozen=True)
class OneStage(Scheduled):
    """Keeps `ceil(keep * n)` prompt tokens after `layer`, which counts from 0."""

    layer: int
    keep: float

    def __post_init__(self) -> None:
        layer = checked.whole(self.layer, "layer", 0, LAYER_LIMIT)
        self._set(layer=layer, keep=checked.keep(self.keep, "keep"))

    def check(self, config: ModelConfig) -> None:
        Pruning({self.layer: self.keep}).check(config)


@dataclass(frozen=True)
class StaticPruning(OneStage):
    """Runs the layers up to `layer` densely, then keeps `ceil(keep * n)` prompt tokens for good, by the query
    token's attention to them, averaged over those layers and all heads."""

    name: ClassVar[str] = "static"

    @property
    def schedule(self) -> Pruning:
        return Pruning({self.layer: Drop(self.keep)}, decode={})

    def core(self) -> dict[str, Any]:
        return {**super().core(), "average": True}

    def scoring_layers(self, config: ModelConfig) -> range:
        return range(self.layer)


@dataclass(frozen=True)
class FastKV(OneStage):
    """FastKV's token-selective propagation (Jo et al. 2025), without its compression of the KV cache: after
    `layer`, the `ceil(keep * n)` prompt tokens that the last 8 attend to most go on, those 8 among them."""

    name: ClassVar[str] = "fastkv"

    @property
    def schedule(self) -> Pruning:
        stages = {self.layer: self.keep}
        scoring = Scoring(queries=ROWS, smooth=FASTKV_NEIGHBOURS)
        return Pruning(stages, scoring=scoring, window=ROWS, decode="frozen")


@dataclass(frozen=True)
class CLAA(OneStage):
    """Cross-Layer Attention Aggregation (McDanel et al. 2026), without compression of the KV cache: FastKV by
    the largest standardised score over `layer`, the three layers below it and all key-value heads."""

    name: ClassVar[str] = "claa"

    @property
    def schedule(self) -> Pruning:
        return Pruning({self.layer: self.keep}, scoring=Scoring(queries=ROWS), window=ROWS, decode="frozen")

    def core(self) -> dict[str, Any]:
        return Aggregation({self.layer: self.keep}, window=ROWS, decode="frozen").core()

    def scoring_layers(self, config: ModelConfig) -> range:
        return range(max(0, self.layer - CLAA_LAYERS + 1), self.layer)


class Aggregation(Policy):
    """CLAA's scores."""

    layers = CLAA_LAYERS

    def observe(self, view: View) -> np.ndarray:
        """The largest standardised score over key-value heads (m,); 0 for tokens that cannot be dropped."""
        free = ~view.protected
        by_head = view.attention(ROWS).reshape(len(view.keys()), -1, free.size).mean(axis=1)
        heads = pooled(by_head[:, free], FASTKV_NEIGHBOURS)
        spread = heads.std(axis=1, keepdims=True)
        heads -= heads.mean(axis=1, keepdims=True)
        np.divide(heads, spread, out=heads, where=spread > 0)
        scores = np.zeros(free.size, np.float32)
        scores[free] = heads.max(axis=0)
        return scores

    def score(self, view: View) -> np.ndarray:
        return np.asarray(np.max([*view.observed.values(), self.observe(view)], axis=0))


@dataclass(frozen=True)
class GemFilter(OneStage):
    """Runs the layers up to `layer`, then the whole model densely on `ceil(keep * N)` tokens of the prompt:
    those whose keys there have the largest products with the last token's queries (Shi et al. 2024)."""

    name: ClassVar[str] = "gemfilter"
    schedule = DENSE

    def kept(self, n_prompt: int) -> int:
        return math.ceil(self.keep * n_prompt)

    def check_length(self, config: ModelConfig, n_prompt: int) -> None:
        if n_prompt > config.context:
            raise ValueError(f"GemFilter reads all {n_prompt} tokens first; the context has {config.context}")

    def ids(self, llm: Any, prompt_ids: list[int], turn: int) -> list[int]:
        if self.kept(len(prompt_ids)) == len(prompt_ids):
            return prompt_ids
        self.check_length(llm.config, len(prompt_ids))
        try:
            llm.session(FirstPass({self.layer: self.keep})).forward(prompt_ids, progress=False)
        except Chosen as chosen:
            return [prompt_ids[i] for i in chosen.args[0]]
        raise AssertionError("the first pass has run past its layer")

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        """The operations of both passes; the first has no LM head."""
        second = super().prefill_flops(config, n_prompt, last_pass)
        if self.kept(n_prompt) == n_prompt:
            return second
        first = sum(layer_flops(config, layer, n_prompt, n_prompt) for layer in range(self.layer + 1))
        return first + score_flops(config, n_prompt) + second


class Chosen(Exception):
    """Ends the first pass of GemFilter, of which nothing above `layer` is wanted; has the positions."""


class FirstPass(Policy):
    """GemFilter's choice."""

    def score(self, view: View) -> NoReturn:
        keys = view.keys()
        heads = view.queries()[:, 0]
        by_kv_head = heads.reshape(len(keys), -1, heads.shape[-1]).sum(axis=1)
        scores = pooled(np.einsum("gd,gmd->m", by_kv_head, keys), GEMFILTER_NEIGHBOURS)
        if not np.isfinite(scores).all():
            raise ValueError(f"GemFilter: a score of layer {view.layer} is no finite number")
        raise Chosen(np.sort(np.argsort(-scores, kind="stable")[: view.n_keep]))


def pooled(scores: np.ndarray, width: int) -> np.ndarray:
    """The means (…, m) of the `width` (odd) scores around each of (…, m); there are zeros beyond the ends."""
    ends = [(0, 0)] * (scores.ndim - 1) + [(width // 2, width // 2)]
    around = np.lib.stride_tricks.sliding_window_view(np.pad(scores, ends), width, axis=-1)
    return np.asarray(around.mean(axis=-1))
