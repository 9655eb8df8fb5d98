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

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        """Also in a session that was restored, which has not asked `for_prompt` again."""
        fitted = self.for_prompt(config, n_prompt)
        return super(Eviction, fitted).prefill_flops(config, n_prompt, last_pass)


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
        free = ~view.protected
        keys, (queries, turns) = view.keys()[:, free], self._asking(view)
        shares, group = np.zeros(keys.shape[:2]), len(queries) // len(keys)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN is refused as a score
            for head, own in enumerate(queries):  # one head at a time: there may be many tokens
                expected = turned(own, turns) / sqrt(self._config.query_scalar)
                key, covariance = keys[head // group], np.cov(expected.T, bias=True, dtype=np.float32)
                exponents = key @ expected.mean(axis=0) + ((key @ covariance) * key).sum(axis=1) / 2
                weights = np.exp(exponents - exponents.max())
                shares[head // group] += weights / weights.sum()
            shares *= np.linalg.norm(view.values()[:, free], axis=-1)
            total = shares.sum(axis=1, keepdims=True)
            np.divide(shares, total, out=shares, where=total > 0)
        scores = np.zeros(free.size, np.float32)
        scores[free] = shares.mean(axis=0)
        return scores

    def score(self, view: View) -> np.ndarray:
        return np.asarray(np.mean([*view.observed.values(), self.observe(view)], axis=0))

    def _asking(self, view: View) -> tuple[np.ndarray, np.ndarray]:
        """The queries (H, n, D) of the new tokens behind the sink; and the turns (n, D/2) of their pairs, as
        complex numbers, from each token's position to the mean rotation of the positions to come."""
        config, length = self._config, int(view.positions[-1]) + 1
        queries = view.queries(MANY)
        positions = view.rows[-queries.shape[1] :]
        first = int(np.searchsorted(positions, SINK))
        row = config.layer_rope[view.layer] + (length > config.short_context)
        frequencies = np.array(config.inv_freq[row])
        ahead = np.exp(1j * np.outer(np.arange(length, length + FUTURE), frequencies)).mean(axis=0)
        turns = ahead * np.exp(-1j * np.outer(positions[first:], frequencies))
        return queries[:, first:], turns.astype(np.complex64)


def turned(rows: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Rows (n, D), of which value i is turned with value i + D/2: the pairs of every family, because the core
    sorts the rows of the weights."""
    first, second = np.split(rows, 2, axis=-1)
    pairs = (first + 1j * second) * turns
    return np.concatenate([pairs.real, pairs.imag], axis=-1)
