"""Space: the settings that a search may propose, as parameters in which almost every point is valid."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.calibration.curves import seeing_layers
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.methods import Preset, PruningInput, as_method
from lazyllm.pruning import RECOMMENDED_SINK, SPEEDUP_SHAPES, Pruning, largest_keep

if TYPE_CHECKING:
    from optuna.trial import Trial

MAX_STAGES = 3
LEVELS = 5  # of the speedup, so that there are several settings to compare at each
OVERSHOOT = 1.01  # a schedule for a speedup has up to 1 % more
STEP = 0.05  # of shares and falls
SHARES, FALLS = (0.05, 0.95), (0.2, 0.95)
OPTIONS: dict[str, tuple[float, ...]] = {
    "smooth": (1, 5, 13, 21, 31),
    "queries": (1, 16, 32),
    "layers": (1, 3, 5, 8),
    "memory": (0.0, 0.95),
}
LEAST_KEEP = 0.02  # of a stage that is to reach a speedup by itself
HALVINGS, DIGITS, LEAST = 20, 4, 1e-4  # of the keeps
STAGES, SPEEDUP, DEPTH = "stages", "speedup level", "depth"


@dataclass(frozen=True)
class Space:
    """Schedules of 1 to MAX_STAGES stages with a counted speedup from `low` to `high`.

    The parameters are the speedup, one of LEVELS through the range; the `depth` of the first stage, or as
    near to it as the speedup can be reached; for each further stage, `rise`, how far up it is between the
    stage before and the top, and `fall`, the ratio of its keep to that before; and the options of the
    scores. The keeps follow from the speedup: they never rise, and no trial is spent on finding them.
    """

    config: ModelConfig
    n_prompt: int
    low: float
    high: float

    def proposed(self, trial: Trial) -> Pruning | None:
        """The setting that the sampler proposes; None if it is outside of the range."""
        speedup = self.levels[trial.suggest_int(SPEEDUP, 0, LEVELS - 1)]
        chosen = {name: trial.suggest_categorical(name, values) for name, values in OPTIONS.items()}
        options = Pruning(sink=RECOMMENDED_SINK, pooling="max", **chosen)
        n_stages = trial.suggest_int(STAGES, 1, MAX_STAGES)
        layers, keeps = [], [1.0]
        share = trial.suggest_float(DEPTH, *SHARES, step=STEP)
        if reaching := self._reaching(speedup, options):
            layers.append(min(at(share, seeing_layers(self.config)), reaching[-1]))
        for number in range(2, n_stages + 1):
            share = trial.suggest_float(f"rise {number}", *SHARES, step=STEP)
            fall = trial.suggest_float(f"fall {number}", *FALLS, step=STEP)
            if layers and (above := self._above(layers[-1])):
                layers.append(at(share, above))
                keeps.append(keeps[-1] * fall)
        made = self._slowest(layers, keeps, options, speedup)
        return made if made and self.holds(made) else None

    def _slowest(
        self, layers: Sequence[int], keeps: Sequence[float], options: Pruning, speedup: float
    ) -> Pruning | None:
        """The schedule with these ratios of keeps that has just the speedup; None if none has it. A stage
        whose keep would be 1 is left out."""
        low, high, best = 0.0, 1 / keeps[-1], None
        for _ in range(HALVINGS if layers else 0):
            factor = (low + high) / 2
            scaled = [max(LEAST, round(factor * keep, DIGITS)) for keep in keeps]
            stages = tuple((layer, keep) for layer, keep in zip(layers, scaled, strict=False) if keep < 1)
            made = replace(options, stages=stages)
            if self.speedup(made) >= speedup:
                low, best = factor, made
            else:
                high = factor
        return best

    def _reaching(self, speedup: float, options: Pruning) -> list[int]:
        """The layers after which one stage can reach the speedup: the lower ones."""
        seeing = seeing_layers(self.config)

        def slowness(layer: int) -> float:
            return -self.speedup(replace(options, stages=((layer, LEAST_KEEP),)))

        return seeing[: bisect_right(seeing, -speedup, key=slowness)]

    def _above(self, layer: int) -> list[int]:
        return [one for one in seeing_layers(self.config) if one > layer]

    @property
    def levels(self) -> list[float]:
        return [float(one) for one in np.linspace(self.low, self.high, LEVELS)]

    def speedup(self, pruning: Pruning) -> float:
        return pruning.speedup(self.config, self.n_prompt)

    def holds(self, pruning: Pruning) -> bool:
        """Whether the counted speedup is within the range, or as near above it as schedules come."""
        return self.low <= self.speedup(pruning) <= OVERSHOOT * self.high

    def parameters(self, pruning: Pruning) -> dict[str, Any]:
        """The nearest point of the space: the sampler learns from settings that it did not propose too."""
        speedup = self.speedup(pruning)
        level = min(range(LEVELS), key=lambda place: abs(self.levels[place] - speedup))
        stages = pruning.stages[:MAX_STAGES]
        layers, keeps = [layer for layer, _ in stages], [largest_keep(rule) for _, rule in stages]
        depth = share_of(layers[0], seeing_layers(self.config))
        made: dict[str, Any] = {SPEEDUP: level, STAGES: len(stages), DEPTH: stepped(depth, SHARES)}
        for number, (below, above) in enumerate(pairwise(zip(layers, keeps, strict=True)), 2):
            rise = share_of(above[0], self._above(below[0]))
            made[f"rise {number}"] = stepped(rise, SHARES)
            made[f"fall {number}"] = stepped(above[1] / below[1], FALLS)
        for name, values in OPTIONS.items():
            made[name] = min(values, key=lambda value: abs(value - getattr(pruning, name)))
        return made

    def neighbour(self, pruning: Pruning, random: np.random.Generator) -> dict[str, Any]:
        """The parameters of a setting that differs in its speedup, in one option, or in one place or keep."""
        made = self.parameters(pruning)
        moves: dict[str, list[Any]] = {
            name: [value for value in values if value != made[name]] for name, values in OPTIONS.items()
        }
        moves[SPEEDUP] = [level for level in (made[SPEEDUP] - 1, made[SPEEDUP] + 1) if 0 <= level < LEVELS]
        for name in [name for name in made if name.startswith((DEPTH, "rise", "fall"))]:
            bounds = FALLS if name.startswith("fall") else SHARES
            near = {stepped(made[name] + sign * STEP, bounds) for sign in (-1, 1)}
            moves[name] = sorted(near - {made[name]})
        names = [name for name, values in moves.items() if values]
        name = names[random.integers(len(names))]
        return {**made, name: moves[name][random.integers(len(moves[name]))]}

    def starts(self) -> list[Pruning]:
        """The stages of `Pruning.for_speedup` under the `recommended` scores, at each level."""
        several = [
            Pruning.of_shapes(SPEEDUP_SHAPES, wished, self.config, self.n_prompt, recommended=True)
            for wished in self.levels
        ]
        return [one for one in dict.fromkeys(several) if self.holds(one)]

    def checked_start(self, given: PruningInput) -> Pruning:
        """A setting of the user's that the search begins with."""
        method = as_method(given)
        pruning = method.pruning if isinstance(method, Preset) else method
        if not isinstance(pruning, Pruning) or not pruning.stages:
            raise ValueError(f"start: {given} is no schedule; give a Pruning with stages, or a preset")
        pruning.check(self.config)
        if not self.holds(pruning):
            raise ValueError(
                f"start: {pruning} has a counted speedup of {self.speedup(pruning):.3f} at {self.n_prompt} "
                f"prompt tokens; the search is for speedups from {self.low:g} to {self.high:g}"
            )
        return pruning


def at(share: float, layers: Sequence[int]) -> int:
    """The layer this far up among the layers."""
    return layers[int(share * len(layers))]


def share_of(layer: int, layers: Sequence[int]) -> float:
    """The depth of the layer as a share of the model: the middle of the range that `at` maps to it."""
    return (sum(one < layer for one in layers) + 0.5) / max(len(layers), 1)


def stepped(value: float, bounds: tuple[float, float]) -> float:
    """The nearest value that the parameter can take."""
    low, high = bounds
    steps = round((min(max(value, low), high) - low) / STEP)
    return round(low + STEP * steps, 2)
