"""SamplingParams: how the next token is drawn from the logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lazyllm.support import checked


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy; top_p 1 and top_k 0 switch those filters off.

    Equal seeds give equal draws. Without a seed each answer gets a new one, its `Generation.seed`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", checked.number(self.temperature, "temperature"))
        object.__setattr__(self, "top_p", checked.keep(self.top_p, "top_p"))
        object.__setattr__(self, "top_k", checked.whole(self.top_k, "top_k", 0))
        if self.seed is not None:
            object.__setattr__(self, "seed", checked.whole(self.seed, "seed", 0, checked.SEED_LIMIT))
        if self.temperature < 0.0:
            raise ValueError(f"temperature must be 0 or above, not {self.temperature}")

    def for_prompt(self, index: int) -> SamplingParams:
        """The same for one prompt of a list, with a seed of its own: `seed` + `index`."""
        if self.seed is None:
            return self
        return replace(self, seed=(self.seed + index) % checked.SEED_LIMIT)


GREEDY = SamplingParams()
