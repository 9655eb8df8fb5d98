"""What a benchmark run was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lazyllm.bench.goals import Goals, of_model
from lazyllm.bench.place import Place, chosen_places
from lazyllm.checkpoint import resolve
from lazyllm.config import ModelConfig
from lazyllm.gguf import demo_model

TOKENS, QUICK_TOKENS = (1024, 2048, 4096, 8192), (256,)
CONTEXT, QUICK_CONTEXT = 4096, 256
ROUNDS, QUICK_ROUNDS = 7, 2
SEED = 0


@dataclass(frozen=True)
class Options:
    """`peers` are those that are installed; `items` of each data set's prompts are taken."""

    tokens: tuple[int, ...]
    context: int
    rounds: int
    places: tuple[Place, ...]
    quick: bool
    peers: tuple[str, ...]
    model: str | None = None
    data: Path | None = None
    items: int = 2

    @classmethod
    def filled(
        cls,
        tokens: Sequence[int] | None,
        context: int | None,
        rounds: int | None,
        device: str,
        threads: Sequence[int] | None,
        quick: bool,
        peers: tuple[str, ...],
        model: str | None,
        data: Path | None,
        items: int,
    ) -> Options:
        """What was given, checked, with a default for each None."""
        made = cls(
            tokens=tuple(tokens or (QUICK_TOKENS if quick else TOKENS)),
            context=context if context is not None else QUICK_CONTEXT if quick else CONTEXT,
            rounds=rounds if rounds is not None else QUICK_ROUNDS if quick else ROUNDS,
            places=chosen_places(device, threads, quick),
            quick=quick,
            peers=peers,
            model=model,
            data=data,
            items=items,
        )
        counts = {
            "tokens": made.tokens,
            "context": (made.context,),
            "rounds": (made.rounds,),
            "threads": tuple(threads or ()),
            "items": (made.items,),
        }
        for name, values in counts.items():
            if wrong := [value for value in values if value < 1]:
                raise ValueError(f"{name} must be at least 1, not {wrong[0]}")
        return made

    @cached_property
    def folder(self) -> Path:
        return resolve(self.model) if self.model else demo_model()

    @property
    def widest(self) -> Place:
        return max(self.places, key=lambda place: place.threads)

    def goals(self, place: Place) -> Goals:
        return of_model(place.on_cpu, self.model is None, self.config.hidden)

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_folder(self.folder)

    def prompt(self, n_tokens: int) -> list[int]:
        """Random ids: how long a pass takes does not depend on them."""
        random = np.random.default_rng(SEED)
        return [int(token) for token in random.integers(0, self.config.vocab, n_tokens)]

    @property
    def fitting_tokens(self) -> list[int]:
        return [n for n in self.tokens if n <= self.config.context]

    @property
    def too_long(self) -> tuple[str, ...]:
        """A sentence if some of the asked lengths are left out."""
        left_out = [str(n) for n in self.tokens if n > self.config.context]
        if not left_out:
            return ()
        return (f"Left out: {', '.join(left_out)} tokens; the model's context is {self.config.context}.",)
