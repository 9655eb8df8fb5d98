"""The options of a benchmark run."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.measuring.goals import Goals, goals_of_model
from benchmarks.measuring.place import Place
from lazyllm.checkpoints.checkpoint import resolve
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.pypi_models import demo_model
from lazyllm.support.checked import whole

FULL: dict[str, Any] = {"tokens": (1024, 2048, 4096, 8192), "context": 4096, "rounds": 7}
QUICK: dict[str, Any] = {"tokens": (256,), "context": 256, "rounds": 2}
SEED = 0
Value = TypeVar("Value")


@dataclass(frozen=True)
class Options:
    tokens: tuple[int, ...]  # prompt lengths
    context: int  # tokens before the decode steps
    rounds: int
    places: tuple[Place, ...]
    quick: bool
    peers: tuple[str, ...]  # the installed ones
    model: str | None  # None: the demonstration model
    data: Path | None  # jsonl files of prompts for the suite `generation`
    items: int  # prompts taken from each file
    gguf: list[Path]  # the same model in other formats, for llama.cpp

    def __post_init__(self) -> None:
        for n in self.tokens:
            whole(n, "tokens", 1)
        for name in ("context", "rounds", "items"):
            whole(getattr(self, name), name, 1)

    @property
    def judged(self) -> bool:
        """True if the results are held against goals: full lengths, and enough rounds for a claim."""
        return not self.quick and self.rounds >= FULL["rounds"]

    def first(self, *values: Value) -> tuple[Value, ...]:
        """All of them, or the first where that is quick enough."""
        return values[:1] if self.quick else values

    @cached_property
    def folder(self) -> Path:
        return resolve(self.model) if self.model else demo_model()

    @property
    def widest(self) -> Place:
        """The place with the most threads."""
        return max(self.places, key=lambda place: place.threads)

    def goals(self, place: Place) -> Goals:
        return goals_of_model(place.on_cpu, self.model is None, self.config.hidden)

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_folder(self.folder)

    def prompt(self, n_tokens: int) -> list[int]:
        """Random token ids; the time of a dense pass does not depend on them."""
        random = np.random.default_rng(SEED)
        return [int(token) for token in random.integers(0, self.config.vocab, n_tokens)]

    @property
    def fitting_tokens(self) -> list[int]:
        """The prompt lengths that fit in the model's context."""
        return [n for n in self.tokens if n <= self.config.context]

    @property
    def too_long(self) -> tuple[str, ...]:
        """A note that names the prompt lengths that do not fit, if any."""
        left_out = ", ".join(str(n) for n in self.tokens if n > self.config.context)
        context = self.config.context
        return (f"Left out: {left_out} tokens; the model's context is {context}.",) if left_out else ()
