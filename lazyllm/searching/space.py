"""Space: the schedules and options that a search may propose, as parameters of Optuna."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.pruning import Pruning, largest_keep
from lazyllm.schedule import head_for, shape
from lazyllm.scoring import WIDEST, Scoring

if TYPE_CHECKING:
    from optuna.trial import Trial

MAX_STAGES = 4
LEVELS = 5  # of the speedup, so that there are several settings to compare at each
OVERSHOOT = 1.01  # a schedule for a speedup has up to 1 % more
SHARES, FALLS = (0.05, 0.95), (0.2, 0.95)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "pooling": ("mean", "rms"),
    "smooth": tuple(range(1, WIDEST + 1, 2)),
    "words": (False, True),
    "queries": (1, 16, 32),
    "layers": (1, 3, 5, 8),
    "memory": (0.0, 0.95),
}


@dataclass(frozen=True)
class Space:
    """Schedules of 1 to MAX_STAGES stages with a counted speedup from `low` to `high`.

    The parameters are the speedup, one of LEVELS in the range; `depth`, the `share` of `shape`: how much of the
    work left by the speedup is that of layers below the first stage; for each further stage its `rise` and
    `fall`, as in `shape`; and the options of the scores. Keeps are no parameters: they follow from the speedup.
    """

    config: ModelConfig
    n_prompt: int
    low: float
    high: float

    @property
    def levels(self) -> list[float]:
        return [float(level) for level in np.linspace(self.low, self.high, LEVELS)]

    def speedup(self, pruning: Pruning) -> float:
        return pruning.speedup(self.config, self.n_prompt)

    def proposed(self, trial: Trial) -> Pruning | None:
        """The setting with the trial's parameters; None if its speedup is out of reach or of the range."""
        speedup = self.levels[trial.suggest_int("speedup level", 0, LEVELS - 1)]
        chosen = {name: trial.suggest_categorical(name, values) for name, values in OPTIONS.items()}
        share = trial.suggest_float("depth", *SHARES)
        further = [
            (trial.suggest_float(f"rise {stage}", *SHARES), trial.suggest_float(f"fall {stage}", *FALLS))
            for stage in range(2, trial.suggest_int("stages", 1, MAX_STAGES) + 1)
        ]
        try:
            usual = Scoring.recommended()
            gain, revival = (usual.gain, usual.revival) if chosen["memory"] else (1.0, 1.0)
            scoring = Scoring(gain=gain, revival=revival, head=head_for(speedup, self.config), **chosen)
            shapes = [(shape(share, speedup, further), 0.0)]
            pruning = Pruning.for_speedup(speedup, self.config, self.n_prompt, scoring, shapes)
        except ValueError:  # out of reach
            return None
        return pruning if self.speedup(pruning) <= OVERSHOOT * self.high else None

    def starts(self) -> Iterator[dict[str, Any]]:
        """The parameters of `Pruning.for_speedup` at each level; an error if it does not reach one."""
        for level, speedup in enumerate(self.levels):
            pruning = Pruning.for_speedup(speedup, self.config, self.n_prompt)
            places = [(layer / self.config.n_layers, largest_keep(rule)) for layer, rule in pruning.stages]
            depth = float(np.clip(places[0][0] * speedup, *SHARES))
            point: dict[str, Any] = {"speedup level": level, "stages": len(places), "depth": depth}
            for stage, ((below, more), (above, fewer)) in enumerate(pairwise(places), 2):
                point[f"rise {stage}"] = float(np.clip((above - below) / (1 - below), *SHARES))
                point[f"fall {stage}"] = float(np.clip(fewer / more, *FALLS))
            yield point | {name: getattr(pruning.scoring, name) for name in OPTIONS}
