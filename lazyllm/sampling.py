"""SamplingParams: how the next token is drawn from the logits."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0 is greedy; top_p 1 and top_k 0 switch those filters off; equal seeds give equal draws."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool | str | bytes):
                raise TypeError(f"{name} must be a number, not {value!r}")
            try:
                object.__setattr__(self, name, float(value))
            except OverflowError:
                raise ValueError(f"{name} is too large") from None
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool):
                raise TypeError(f"{name} must be a whole number, not {value!r}")
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise TypeError(f"{name} must be a whole number, not {value!r}") from None
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature must be 0 or above, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be from 0 (off) to {2**31 - 1}, not {self.top_k}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to {2**63 - 1}, not {self.seed}")
