"""The paper's baselines: dropping tokens at random, and one choice of tokens made early and for good."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lazyllm.counted_work import score_flops
from lazyllm.pruning import DENSE, Pruning, Scheduled
from lazyllm.stages import LAYER_LIMIT, Drop
from lazyllm.support import checked

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig


@dataclass(frozen=True, repr=False)
class RandomDrop(Scheduled):
    """Runs the model densely on `ceil(keep * N)` random tokens of the prompt, the last one always among them.

    They keep their order. Their positions are consecutive, or with `original_positions` those in the prompt.
    Each prompt of a conversation has a sample of its own.
    """

    name: ClassVar[str] = "random"
    keep: float
    seed: int = 0
    original_positions: bool = False

    def __post_init__(self) -> None:
        self._set(
            keep=checked.keep(self.keep, "keep"), seed=checked.whole(self.seed, "seed", 0, checked.SEED_LIMIT)
        )
        checked.truth(self.original_positions, "original_positions")

    def __repr__(self) -> str:
        places = ", original_positions=True" if self.original_positions else ""
        return f"RandomDrop(keep={self.keep!r}, seed={self.seed!r}{places})"

    @property
    def schedule(self) -> Pruning:
        return DENSE

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
class StaticPruning(Scheduled):
    """Runs the first `layers` layers densely, then keeps `ceil(keep * n)` prompt tokens for good.

    A token's score is the query token's attention to it, averaged over those layers and all heads. Dropped
    tokens leave every cache and never come back.
    """

    name: ClassVar[str] = "static"
    layers: int
    keep: float

    def __post_init__(self) -> None:
        self._set(
            layers=checked.whole(self.layers, "layers", 1, LAYER_LIMIT), keep=checked.keep(self.keep, "keep")
        )

    @property
    def schedule(self) -> Pruning:
        """The schedule without the scores of the lower layers, which count as `extra_flops`."""
        return Pruning({self.layers - 1: Drop(self.keep)}, decode={})

    def check(self, config: ModelConfig) -> None:
        if self.layers >= config.n_layers:
            raise ValueError(
                f"layers must be below {config.n_layers}, the number of the model's layers, not {self.layers}"
            )

    def core(self) -> dict[str, Any]:
        return {**super().core(), "average": True}

    def extra_flops(self, config: ModelConfig, n_prompt: int, in_play: int, computed: int) -> int:
        return (self.layers - 1) * score_flops(config, in_play)
