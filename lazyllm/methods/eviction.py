"""SnapKV and ExpectedAttention: a dense prefill, after which later passes attend to fewer tokens."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Self

import numpy as np

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.counted_work import bare_flops, token_counts
from lazyllm.method import MANY
from lazyllm.policy import Policy, View
from lazyllm.pruning import DENSE, LAYER_LIMIT, Drop, Pruning, Scheduled
from lazyllm.scoring import Scoring
from lazyllm.support import checked

ROWS, NEIGHBOURS = 64, 5  # of SnapKV
SINK, FUTURE = 4, 512  # of ExpectedAttention: tokens that draw attention, and positions that it looks ahead


@dataclass(frozen=True)
class Eviction(Scheduled):
    """Computes the whole prompt in every layer; later passes have `ceil(keep * n)` of its tokens in play."""

    keep: float
    reads_in_parts = False
    _config: ClassVar[ModelConfig | None] = None  # of the model that `for_prompt` has been asked about

    def __post_init__(self) -> None:
        self._set(keep=checked.keep(self.keep, "keep"))

    def for_prompt(self, config: ModelConfig, n_prompt: int) -> Self:
        fitted = copy(self)
        fitted._set(_config=config)
        return fitted

    @property
    def config(self) -> ModelConfig:
        if self._config is None:
            raise RuntimeError(f"{self} has a schedule for a model only: for_prompt gives it")
        return self._config

    def _last(self, **options: Any) -> Pruning:
        return Pruning({self.config.n_layers - 1: Drop(self.keep)}, decode={}, **options)

    def check(self, config: ModelConfig) -> None:
        DENSE.check(config)

    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        return super(Eviction, self.for_prompt(config, n_prompt)).flops(config, n_prompt)


@dataclass(frozen=True)
class SnapKV(Eviction):
    """SnapKV (Li et al. 2024), with one set of tokens for all layers and heads: those that the prompt's last
    64 tokens attend to most, and these."""

    name: ClassVar[str] = "snapkv"

    @property
    def schedule(self) -> Pruning:
        return self._last(scoring=Scoring(queries=ROWS, smooth=NEIGHBOURS), window=ROWS)

    def core(self) -> dict[str, Any]:
        return {**super().core(), "average": True}

    def scoring_layers(self, config: ModelConfig) -> range:
        return range(config.n_layers - 1)


@dataclass(frozen=True)
class ExpectedAttention(Eviction):
    """Expected attention (Devoto et al. 2025), with one set of tokens for all layers and heads: those to
    which queries of the prompt's distribution would attend most at the next 512 positions."""

    name: ClassVar[str] = "expected"

    @property
    def schedule(self) -> Pruning:
        return self._last(sink=SINK)

    def core(self) -> dict[str, Any]:
        return Expectation(self.schedule, self.config).core()

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        """Without scores, which are in NumPy: `Generation.policy_seconds` is their time."""
        return bare_flops(config, *token_counts(last_pass))


class Expectation(Policy):
    """The scores of ExpectedAttention."""

    layers, queries = LAYER_LIMIT, MANY  # all there are

    def __init__(self, schedule: Pruning, config: ModelConfig) -> None:
        super().__init__(schedule)
        self._config = config

    def observe(self, view: View) -> np.ndarray:
        """The scores of one layer (m,); 0 for tokens that cannot be dropped."""
        free, scale = ~view.protected, sqrt(self._config.query_scalar)
        keys, lengths = view.keys()[:, free], np.linalg.norm(view.values()[:, free], axis=-1)
        expected = self._expected(view) / scale
        mean = expected.mean(axis=1)
        centred = expected - mean[:, None]
        covariance = centred.transpose(0, 2, 1) @ centred / centred.shape[1]  # (H, D, D)
        by_head = keys.repeat(len(mean) // len(keys), axis=0)
        products = np.einsum("hd,hmd->hm", mean, by_head)
        products += np.einsum("hmd,hmd->hm", by_head @ covariance, by_head) / 2
        weights = np.exp(products - products.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        shares = weights.reshape(len(keys), -1, lengths.shape[1]).mean(axis=1) * lengths
        total = shares.sum(axis=1, keepdims=True)
        np.divide(shares, total, out=shares, where=total > 0)
        scores = np.zeros(free.size, np.float32)
        scores[free] = shares.mean(axis=0)
        return scores

    def score(self, view: View) -> np.ndarray:
        return np.asarray(np.mean([*view.observed.values(), self.observe(view)], axis=0))

    def _expected(self, view: View) -> np.ndarray:
        """The queries (H, n, D) of the new tokens behind the sink, turned back from their own positions and
        on by the mean rotation of the positions to come."""
        config, length = self._config, int(view.positions[-1]) + 1
        queries = view.queries(MANY)
        positions = view.rows[-queries.shape[1] :]
        queries, positions = queries[:, positions >= SINK], positions[positions >= SINK]
        row = config.layer_rope[view.layer] + (length > config.short_context)
        frequencies = np.array(config.inv_freq[row])
        ahead = np.exp(1j * np.outer(np.arange(length, length + FUTURE), frequencies)).mean(axis=0)
        turns = ahead * np.exp(-1j * np.outer(positions, frequencies))  # (n, pairs)
        # the core turns value i with value i + D/2, in every family: it has sorted the rows of the weights
        first, second = np.split(queries, 2, axis=-1)
        turned = (first + 1j * second) * turns
        return np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32)
