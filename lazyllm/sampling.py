"""SamplingParams: how the next token is drawn from the logits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from math import log
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.support import checked

if TYPE_CHECKING:
    from lazyllm.llm import LLM


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn; names and meanings are vLLM's.

    `temperature` 0 is greedy; `top_p` 1, `top_k` 0, `min_p` 0 and `repetition_penalty` 1 switch those off.
    `min_p` drops tokens less likely than that share of the likeliest one. `repetition_penalty` divides the
    positive logits of tokens that the context has, and multiplies the negative ones. Without a seed each
    answer gets a new one, its `Generation.seed`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = {"temperature": checked.number, "repetition_penalty": checked.number}
        for name, check in (checks | {"top_p": checked.keep, "min_p": checked.share}).items():
            object.__setattr__(self, name, check(getattr(self, name), name))
        object.__setattr__(self, "top_k", checked.whole(self.top_k, "top_k", 0))
        if self.seed is not None:
            object.__setattr__(self, "seed", checked.whole(self.seed, "seed", 0, checked.SEED_LIMIT))
        if self.temperature < 0.0:
            raise ValueError(f"temperature must be 0 or above, not {self.temperature}")
        if self.repetition_penalty <= 0.0:
            raise ValueError(f"repetition_penalty must be above 0, not {self.repetition_penalty}")

    @classmethod
    def of(cls, model: LLM) -> SamplingParams:
        """The parameters that the checkpoint's generation_config.json recommends; greedy without any."""
        config = model.checkpoint.generation_config
        names = {"repetition_penalty"}
        if samples := bool(config.get("do_sample")):
            names = {field.name for field in fields(cls)} - {"seed"}
        recommended = {name: config[name] for name in names if config.get(name) is not None}
        return cls(**{"temperature": float(samples), **recommended})

    @property
    def changes_logits(self) -> bool:
        """True if `applied` may change which token is drawn."""
        return self.repetition_penalty != 1.0 or (self.min_p > 0.0 and self.temperature > 0.0)

    def applied(self, logits: np.ndarray, context: Collection[int]) -> np.ndarray:
        """The logits changed by `repetition_penalty` and `min_p`, after a context of these tokens."""
        logits = np.array(logits, np.float32)
        seen = np.unique(np.fromiter(context, np.int64))
        factor = np.where(logits[seen] > 0, 1 / self.repetition_penalty, self.repetition_penalty)
        logits[seen] *= factor.astype(np.float32)
        if self.min_p > 0.0:
            logits[logits < logits.max() + self.temperature * log(self.min_p)] = -np.inf
        return logits

    def for_prompt(self, index: int) -> SamplingParams:
        """The same for one prompt of a list, with a seed of its own: `seed` + `index`."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) % checked.SEED_LIMIT)


GREEDY = SamplingParams()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """The log-softmax over the last axis, in double precision."""
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
