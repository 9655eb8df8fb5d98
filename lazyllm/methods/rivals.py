"""Rivals of Pruning: the paper's baselines; FastKV, CLAA and GemFilter, which choose tokens once; SnapKV and
ExpectedAttention, whose prefill is dense, and after which later passes attend to fewer tokens."""

import math
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self

import numpy as np

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.counted_work import bare_flops, layer_flops, score_flops
from lazyllm.method import MANY
from lazyllm.policy import Policy, View
from lazyllm.pruning import DENSE, LAYER_LIMIT, Drop, Pruning, Scheduled
from lazyllm.scoring import Scoring
from lazyllm.support import checked

ROWS = 8  # the last queries, which score in FastKV and CLAA; their tokens always stay
FASTKV_NEIGHBOURS, GEMFILTER_NEIGHBOURS = 7, 5
CLAA_LAYERS = 4
SNAPKV_ROWS, SNAPKV_NEIGHBOURS = 64, 5
SINK, FUTURE = 4, 512  # of ExpectedAttention: tokens that draw attention, and positions that it looks ahead


@dataclass(frozen=True)
class RandomDrop(Scheduled):
    """Runs the model densely on `ceil(keep * N)` random tokens of the prompt, the last one always among them,
    at consecutive positions."""

    name: ClassVar[str] = "random"
    keep: float
    seed: int = 0
    schedule = DENSE

    def __post_init__(self) -> None:
        self._set(keep=checked.keep(self.keep, "keep"), seed=checked.whole(self.seed, "seed", 0, checked.SEED_LIMIT))

    def positions(self, n_prompt: int, turn: int = 0) -> np.ndarray:
        """Indices of the prompt's tokens that stay, ascending."""
        chosen = np.random.default_rng([self.seed, turn]).choice(n_prompt - 1, self.kept(n_prompt) - 1, replace=False)
        return np.append(np.sort(chosen), n_prompt - 1)

    def kept(self, n_prompt: int) -> int:
        return math.ceil(self.keep * n_prompt)

    def ids(self, llm: Any, prompt_ids: list[int], turn: int) -> list[int]:
        return [prompt_ids[i] for i in self.positions(len(prompt_ids), turn)]


class Averaged(Scheduled):
    """A schedule of one stage, scored by the mean over all layers up to it."""

    all_layers_score = True

    def core(self) -> dict[str, Any]:
        return {**self.schedule.core(), "layers": 1, "average": True}


@dataclass(frozen=True)
class OneStage(Scheduled):
    """Keeps `ceil(keep * n)` prompt tokens after `layer`, which counts from 0."""

    layer: int
    keep: float

    def __post_init__(self) -> None:
        self._set(layer=checked.whole(self.layer, "layer", 0, LAYER_LIMIT), keep=checked.keep(self.keep, "keep"))

    def check(self, config: ModelConfig) -> None:
        Pruning({self.layer: self.keep}).check(config)


@dataclass(frozen=True)
class StaticPruning(Averaged, OneStage):
    """Runs the layers up to `layer` densely, then keeps `ceil(keep * n)` prompt tokens for good, by the query
    token's attention to them, averaged over those layers and all heads."""

    name: ClassVar[str] = "static"

    @property
    def schedule(self) -> Pruning:
        return Pruning({self.layer: Drop(self.keep)}, scoring=Scoring(layers=LAYER_LIMIT), decode={})


@dataclass(frozen=True)
class FastKV(OneStage):
    """FastKV's token-selective propagation (Jo et al. 2025), without its compression of the KV cache: after
    `layer`, the `ceil(keep * n)` prompt tokens that the last 8 attend to most go on, those 8 among them."""

    name: ClassVar[str] = "fastkv"
    scoring: ClassVar[Scoring] = Scoring(queries=ROWS, smooth=FASTKV_NEIGHBOURS)

    @property
    def schedule(self) -> Pruning:
        return Pruning({self.layer: self.keep}, scoring=self.scoring, window=ROWS, decode="frozen")


@dataclass(frozen=True)
class CLAA(FastKV):
    """Cross-Layer Attention Aggregation (McDanel et al. 2026), without compression of the KV cache: FastKV by
    the largest standardised score over `layer`, the three layers below it and all key-value heads."""

    name: ClassVar[str] = "claa"
    scoring: ClassVar[Scoring] = Scoring(queries=ROWS, layers=CLAA_LAYERS)
    all_layers_score = True

    def core(self) -> dict[str, Any]:
        return Aggregation(self.schedule).core()


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

    def ids(self, llm: Any, prompt_ids: list[int], turn: int) -> list[int]:
        if self.kept(len(prompt_ids)) == len(prompt_ids):
            return prompt_ids
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
        first = sum(layer_flops(config, layer, n_prompt, n_prompt, n_prompt) for layer in range(self.layer))
        first += layer_flops(config, self.layer, n_prompt, n_prompt, 0)
        return first + score_flops(config, n_prompt) + second


class Chosen(Exception):
    """Ends GemFilter's first pass after `layer`, with the chosen positions as its argument."""


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


@dataclass(frozen=True)
class Eviction(Scheduled):
    """Computes the whole prompt in every layer; later passes have `ceil(keep * n)` of its tokens in play."""

    keep: float
    options: ClassVar[dict[str, Any]] = {}
    reads_in_parts = False
    _config: ClassVar[ModelConfig | None] = None  # that `for_prompt` was called with

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

    @property
    def schedule(self) -> Pruning:
        return Pruning({self.config.n_layers - 1: Drop(self.keep)}, decode={}, **self.options)

    def check(self, config: ModelConfig) -> None:
        DENSE.check(config)


@dataclass(frozen=True)
class SnapKV(Averaged, Eviction):
    """SnapKV (Li et al. 2024), with one set of tokens for all layers and heads: those that the prompt's last
    64 tokens attend to most, and these."""

    name: ClassVar[str] = "snapkv"
    options: ClassVar[dict[str, Any]] = {
        "scoring": Scoring(layers=LAYER_LIMIT, queries=SNAPKV_ROWS, smooth=SNAPKV_NEIGHBOURS),
        "window": SNAPKV_ROWS,
    }


@dataclass(frozen=True)
class ExpectedAttention(Eviction):
    """Expected attention (Devoto et al. 2025), with one set of tokens for all layers and heads: those to
    which queries of the prompt's distribution would attend most at the next 512 positions."""

    name: ClassVar[str] = "expected"
    options: ClassVar[dict[str, Any]] = {"sink": SINK}

    def core(self) -> dict[str, Any]:
        return Expectation(self.schedule, self.config).core()

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        """Without scores, which are in NumPy: `Generation.policy_seconds` is their time."""
        return bare_flops(config, last_pass)


class Expectation(Policy):
    """The scores of ExpectedAttention."""

    layers, queries = LAYER_LIMIT, MANY

    def __init__(self, schedule: Pruning, config: ModelConfig) -> None:
        super().__init__(schedule)
        self._config = config

    def observe(self, view: View) -> np.ndarray:
        """The scores of one layer (m,); 0 for tokens that cannot be dropped."""
        free = ~view.protected
        keys, (queries, turns) = view.keys()[:, free], self._asking(view)
        shares, group = np.zeros(keys.shape[:2]), len(queries) // len(keys)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN is refused as a score
            for head, rows in enumerate(queries):  # one head at a time: there may be many tokens
                expected = turned(rows, turns) / math.sqrt(self._config.query_scalar)
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
        frequencies = np.array(config.inv_freq[config.layer_rope[view.layer] + (length > config.short_context)])
        ahead = np.exp(1j * np.outer(np.arange(length, length + FUTURE), frequencies)).mean(axis=0)
        turns = ahead * np.exp(-1j * np.outer(positions[first:], frequencies))
        return queries[:, first:], turns.astype(np.complex64)


def pooled(scores: np.ndarray, width: int) -> np.ndarray:
    """The means (…, m) of the `width` (odd) scores around each of (…, m); there are zeros beyond the ends."""
    ends = [(0, 0)] * (scores.ndim - 1) + [(width // 2, width // 2)]
    around = np.lib.stride_tricks.sliding_window_view(np.pad(scores, ends), width, axis=-1)
    return np.asarray(around.mean(axis=-1))


def turned(rows: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """Rows (n, D) rotated by `turns`: values i and i + D/2 are a pair, in every family, because the core sorts
    the rows of the weights."""
    first, second = np.split(rows, 2, axis=-1)
    pairs = (first + 1j * second) * turns
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


RIVALS = RandomDrop, StaticPruning, FastKV, CLAA, GemFilter, SnapKV, ExpectedAttention
