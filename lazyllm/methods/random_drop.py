"""RandomDrop: a random share of the prompt, read densely."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lazyllm.pruning import DENSE, Counted
from lazyllm.support import checked

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig


@dataclass(frozen=True, repr=False)
class RandomDrop(Counted):
    """Runs the model densely on `ceil(keep * N)` random tokens of the prompt, the last one always among them.

    They keep their order. Their positions are consecutive, or with `original_positions` those in the prompt.
    Each prompt of a conversation has a sample of its own.
    """

    name: ClassVar[str] = "random"
    keep: float
    seed: int = 0
    original_positions: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", checked.keep(self.keep, "keep"))
        object.__setattr__(self, "seed", checked.whole(self.seed, "seed", 0, checked.SEED_LIMIT))
        if not isinstance(self.original_positions, bool):
            raise TypeError(f"original_positions must be True or False, not {self.original_positions!r}")

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

    def flops(self, config: ModelConfig, n_prompt: int) -> int:
        """Counted operations of a prefill, as `Pruning.flops` counts them."""
        return DENSE.flops(config, self.kept(checked.whole(n_prompt, "n_prompt", 1)))

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int:
        return DENSE.prefill_flops(config, n_prompt, last_pass)
