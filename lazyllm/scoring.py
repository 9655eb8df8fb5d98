"""Scoring: how the tokens in play at a stage are scored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lazyllm.support import checked

PLACES = 11  # runs of `smooth` tokens for which the first stage has room
NARROWEST, WIDEST = 13, 31  # limits of `smooth`
MOST_GAIN = 1000
MOST_QUERIES = 512  # with a head: a block of its levelled attention


@dataclass(frozen=True, kw_only=True, repr=False)
class Scoring:
    """The options of the score; without any it is the paper's, the query token's attention.

    The attention of the last `queries` new tokens is pooled: "mean" is the mean over heads and these tokens,
    "rms" the root mean square over heads and the largest over tokens; that of `head`, a pair (layer, head), counts
    eight times and is levelled over distance (with at most 512 `queries`). Then a score is the largest in the last
    `layers` layers, averaged over `smooth` neighbours (odd); with `words` it becomes the largest of the token's
    word; and in decode steps it counts `gain` times and is at least `memory` times the remembered score. The score
    of a token that would have to be revived counts `revival` times. docs/method.md defines each.
    """

    layers: int = 1
    queries: int = 1
    pooling: Literal["mean", "rms"] = "mean"
    head: tuple[int, int] | None = None
    smooth: int = 1
    words: bool = False
    memory: float = 0.0
    gain: float = 1.0
    revival: float = 1.0

    def __post_init__(self) -> None:
        for name in ("layers", "queries", "smooth"):
            object.__setattr__(self, name, checked.whole(getattr(self, name), name, 1))
        checked.truth(self.words, "words")
        checked.choice(self.pooling, "pooling", ("mean", "rms"))
        if self.head is not None:
            if not isinstance(self.head, tuple | list) or len(self.head) != 2:
                raise TypeError(f"head must be (layer, head) or None, not {self.head!r}")
            layer, head = self.head
            pair = checked.whole(layer, "head's layer", 0), checked.whole(head, "head's number", 0)
            object.__setattr__(self, "head", pair)
            if self.queries > MOST_QUERIES:
                raise ValueError(f"queries must be at most {MOST_QUERIES} with a head, not {self.queries}")
        for name in ("memory", "revival"):
            object.__setattr__(self, name, checked.share(getattr(self, name), name))
        object.__setattr__(self, "gain", checked.number(self.gain, "gain"))
        if not 1.0 <= self.gain <= MOST_GAIN:
            raise ValueError(f"gain must be from 1 to {MOST_GAIN}, not {self.gain}")
        for name in ("gain", "revival"):
            if not self.memory and (value := getattr(self, name)) != 1.0:
                raise ValueError(f"{name} needs memory, beside which it weighs scores, and is {value} without any")
        if self.smooth % 2 == 0:
            raise ValueError(f"smooth must be odd, so that a mean has a centre, not {self.smooth}")

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return f"Scoring({', '.join(f'{name}={value!r}' for name, value, usual in values if value != usual)})"

    @classmethod
    def paper(cls) -> Scoring:
        """The paper's rule: one row of one layer."""
        return cls()

    @classmethod
    def recommended(cls, n_prompt: int = 2048, keep: float = 0.4) -> Scoring:
        """The rule that was found to lose least, for a first stage that keeps `keep` of `n_prompt` tokens.

        Scores are smoothed over an eleventh of the kept tokens, at least 13 and at most 31: a peak keeps
        about as many tokens.
        """
        n_kept = math.ceil(checked.share(keep, "keep") * checked.whole(n_prompt, "n_prompt", 1))
        smooth = min(max(n_kept // PLACES, NARROWEST), WIDEST) | 1
        return cls(layers=5, queries=32, pooling="rms", smooth=smooth, words=True, memory=0.95, gain=4.0, revival=0.3)

    @classmethod
    def from_fields(cls, value: Any) -> Scoring:
        """A Scoring from a mapping of its fields."""
        if isinstance(value, Scoring):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"scoring must be a lazyllm.Scoring or a mapping of its fields, not {value!r}")
        checked.known_names(value, [field.name for field in fields(cls)], "scoring")
        return cls(**value)
