"""Speedup: a number as a setting; the schedule follows when the length of the prompt is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NoReturn

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.method import Method, Spans
from lazyllm.pruning import Pruning, checked_spans
from lazyllm.schedule import SHAPE_LENGTH, OutOfReach
from lazyllm.scoring import Scoring
from lazyllm.support import checked

SHORTEST = 64
"""Contexts of fewer prompt tokens run dense: they take little time, and have few tokens to spare."""
schedule = lru_cache(Pruning.for_speedup)  # every session asks for the same model and often the same length


@dataclass(frozen=True)
class Speedup(Method):
    """A counted speedup of the prefill: the schedule of `Pruning.for_speedup` for the length of a session's first
    prompt; one too short to gain runs dense, with its answer. As text it is `2x`. The spans (first, end) of
    `protect` are always kept, even if the speedup is then not reached."""

    name: ClassVar[str] = "speedup"
    factor: float
    protect: Spans = ()

    def __post_init__(self) -> None:
        factor = checked.number(self.factor, "a speedup")
        if factor <= 1.0:
            raise ValueError(
                f"a speedup must be above 1, such as 2.0, not {factor:g}; without a setting all is dense, and "
                "a share of tokens to keep belongs to a stage, such as {10: 0.5}"
            )
        self._set(factor=factor, protect=checked_spans(self.protect))

    def __str__(self) -> str:
        return f"{self.factor:g}x" + (f" protect={self.protect}" if self.protect else "")

    def protecting(self, spans: Spans) -> Speedup:
        return replace(self, protect=(*self.protect, *spans))

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError if the model cannot reach the speedup; it names the highest."""
        schedule(self.factor, config, SHAPE_LENGTH)

    def for_prompt(self, config: ModelConfig, n_prompt: int) -> Pruning:
        try:
            pruning, least = schedule(self.factor, config, max(n_prompt, SHORTEST)), SHORTEST
        except OutOfReach:  # as a rule too short for so high a speedup; a follow-up may make it long enough
            pruning, least = schedule(self.factor, config, SHAPE_LENGTH), max(n_prompt + 1, SHAPE_LENGTH)
        return replace(pruning, min_tokens=least, protect=self.protect)

    reads_in_parts = True
    asking_rows = Scoring.recommended().queries

    def core(self) -> NoReturn:
        raise RuntimeError("a Speedup has a schedule for a prompt only: for_prompt gives it")
