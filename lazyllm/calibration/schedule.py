"""The schedules that lose least for a wished counted speedup: dynamic programming over layers and keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lazyllm.calibration.curves import KEEPS, Lost, stage_layers
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.counted_work import layer_flops
from lazyllm.pruning import Pruning, largest_that

DENSE_SHARES = (0.4, 0.55, 0.65, 0.75)
"""For each share, one schedule is tried that spends at least this share of its work below its first stage.

What the answer attends to does not tell what other tokens lose when those that they read are dropped early;
the trials do.
"""
WORST_SHARE = 0.25  # of the prompts: the schedule is chosen by these
MAX_STAGES = 4
STAGE_GAIN = 0.002  # of the share lost
PRICES = tuple(np.geomspace(0.01, 10, 32).tolist())  # of a dense prefill, in shares lost
PRECISION, DIGITS, LEAST_KEEP = 1e-6, 4, 1e-4  # of the keeps
Stages = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Losses:
    """The shares of attention that stages after `layers` lose with `keeps`, which fall.

    `lost` is (layers, keeps, layers of the model): `lost[0, 1, 9]` is what layer 9 of the model loses to a
    stage after `layers[0]` with `keeps[1]`; 0 up to the stage's own layer.
    """

    layers: tuple[int, ...]
    keeps: tuple[float, ...]
    lost: np.ndarray

    @classmethod
    def of_prompts(cls, lost: Sequence[Lost], config: ModelConfig) -> Losses:
        """The mean over the worst prompts of each stage, keep and layer; `lost_by_stage` of each prompt."""
        layers = stage_layers(config)
        by_prompt = np.zeros((len(lost), len(layers), len(KEEPS), config.n_layers))
        for prompt, by_stage in enumerate(lost):
            for place, (layer, above) in enumerate(zip(layers, by_stage, strict=True)):
                by_prompt[prompt, place, :, layer + 1 : -1] = above
        worst = np.sort(by_prompt, axis=0)[-math.ceil(WORST_SHARE * len(lost)) :]
        return cls(tuple(layers), KEEPS, worst.mean(axis=0))

    def from_layer(self, first: int) -> Losses:
        """The losses of stages after the layer `first` and layers above it."""
        places = [place for place, layer in enumerate(self.layers) if layer >= first]
        return Losses(tuple(self.layers[place] for place in places), self.keeps, self.lost[places])

    def of(self, stages: Sequence[tuple[int, Any]]) -> float:
        """The share that a schedule loses, mean over the layers of the model.

        Above several stages it is the largest of their shares. This is a lower bound: a stage chooses among
        the tokens that the stages below it have left. A stage after none of `layers` loses nothing here.
        """
        by_layer = np.zeros(self.lost.shape[2])
        rising = [*self.keeps[::-1], 1.0]
        for layer, keep in stages:
            if layer in self.layers:
                curves = np.append(self.lost[self.layers.index(layer), ::-1], [0 * by_layer], axis=0)
                by_layer = np.maximum(by_layer, [np.interp(keep, rising, curve) for curve in curves.T])
        return float(by_layer.mean())


@dataclass(frozen=True)
class Work:
    """Counted operations as shares of a dense prefill.

    `dense` (layers of the model) and `pruned` (keeps, layers of the model) are those of each layer, `scores`
    (layers) those of the scores of one stage.
    """

    dense: np.ndarray
    pruned: np.ndarray
    scores: np.ndarray

    @classmethod
    def counted(cls, losses: Losses, config: ModelConfig, n_prompt: int, options: Pruning) -> Work:
        def of_layers(n: int) -> list[int]:
            return [layer_flops(config, layer, n, n) for layer in range(config.n_layers)]

        dense = Pruning().flops(config, n_prompt)
        pruned = [of_layers(math.ceil(keep * n_prompt)) for keep in losses.keeps]
        one_stage = [replace(options, stages=((layer, 1.0),)) for layer in losses.layers]
        scores = [pruning.flops(config, n_prompt) - dense for pruning in one_stage]
        return cls(np.array(of_layers(n_prompt)) / dense, np.array(pruned) / dense, np.array(scores) / dense)


def cheapest(
    losses: Losses, work: Work, price: float, lasting: bool, max_stages: int = MAX_STAGES
) -> Iterator[tuple[float, Stages]]:
    """The least sums of loss and price times work, and their schedules, with 1 to `max_stages` stages.

    There are fewer where there are fewer layers or keeps. The loss is a mean over layers. `lasting` charges a
    stage for all layers above it, an upper bound of the schedule's loss; otherwise only for those below the
    next stage, a lower bound.
    """
    places, n_layers = np.array(losses.layers, int), losses.lost.shape[2]
    share = losses.lost / n_layers
    entry = np.repeat(price * work.scores[:, None], len(losses.keeps), axis=1)
    running = np.repeat(price * work.pruned[None], len(places), axis=0)
    if lasting:
        entry = entry + share.sum(axis=2)
    else:
        running = running + share
    sums = running.cumsum(axis=2)  # a stage's sum up to a layer is this one without `before`
    before = sums[np.arange(len(places)), :, places]
    rest = sums[:, :, -1] - before

    value = price * work.dense.cumsum()[places][:, None] + entry  # of all up to a last stage here
    origins: list[np.ndarray] = []
    for _ in range(min(max_stages, len(places), len(losses.keeps))):
        total = value + rest
        place, keep = np.unravel_index(total.argmin(), total.shape)
        if not np.isfinite(total[place, keep]):
            return
        path = [(place, keep)]  # the stages from the top down
        for origin in reversed(origins):
            path.append(tuple(origin[path[-1]]))
        stages = tuple((losses.layers[i], losses.keeps[r]) for i, r in reversed(path))
        yield float(total[place, keep]), stages
        value, origin = next_stage(value - before, sums, places, entry)
        origins.append(origin)


def next_stage(
    value: np.ndarray, sums: np.ndarray, places: np.ndarray, entry: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The least value of schedules with one stage more, by its place and keep, and where each comes from.

    That is the place and keep of the stage before, which lies below and keeps more.
    """
    n_places, n_keeps = value.shape
    best = np.full((n_places, n_keeps), np.inf)
    origin = np.zeros((n_places, n_keeps, 2), int)
    for place in range(1, n_places):
        reached = value[:place] + sums[:place, :, places[place]]
        below, least = reached.argmin(axis=0), reached.min(axis=0)
        running = np.minimum.accumulate(least)
        keep = np.maximum.accumulate(np.where(least == running, np.arange(n_keeps), 0))
        best[place, 1:] = running[:-1] + entry[place, 1:]
        origin[place, 1:] = np.stack([below[keep], keep], axis=1)[:-1]
    return best, origin


def schedules(
    losses: Losses, config: ModelConfig, n_prompt: int, speedup: float, shares: Sequence[float] = DENSE_SHARES
) -> Iterator[Pruning]:
    """The schedule that loses least for each of DENSE_SHARES, where one reaches the speedup."""
    options = Pruning().recommended()
    for share in shares:
        above = losses.from_layer(round(share * config.n_layers / speedup))
        if stages := best_schedule(above, config, n_prompt, options, speedup):
            yield Pruning(dict(stages)).recommended(n_prompt)


def best_schedule(
    losses: Losses, config: ModelConfig, n_prompt: int, options: Pruning, speedup: float
) -> Stages | None:
    """The schedule that loses least and just reaches the counted speedup; None if none reaches it.

    A stage more must gain STAGE_GAIN.
    """
    work = Work.counted(losses, config, n_prompt, options)
    candidates = {
        stages
        for price in PRICES
        for lasting in (False, True)
        for _, stages in cheapest(losses, work, price, lasting)
    }

    def reaches(stages: Stages) -> bool:
        return replace(options, stages=stages).speedup(config, n_prompt) >= speedup

    reaching = filter(None, (tuned(stages, reaches) for stages in sorted(candidates)))
    return min(reaching, key=lambda stages: losses.of(stages) + STAGE_GAIN * len(stages), default=None)


def tuned(stages: Stages, reaches: Callable[[Stages], bool]) -> Stages | None:
    """All keeps times the largest factor that reaches the speedup; None if there is none."""

    def scaled(factor: float) -> Stages:
        return tuple((layer, max(LEAST_KEEP, round(factor * keep, DIGITS))) for layer, keep in stages)

    high = 1 / stages[0][1]
    return largest_that(reaches, scaled, high, tolerance=high * PRECISION)
