"""The methods that the paper compares, at settings of equal speedup by counted operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lazyllm.method import Method
from lazyllm.methods import PromptCompression, RandomDrop, StaticPruning
from lazyllm.pruning import Pruning

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig

BASELINE, RANDOM, STATIC = "Baseline", "Random Token Drop", "Static Token Pruning"
COMPRESSION, LAZY, RECOMMENDED = "Prompt Compression", "LazyLLM", "LazyLLM, recommended"
STATIC_DEPTH = 1 / 8  # share of the layers that run before static pruning: 4 of 32
KEEP_STEP = 1e-4

Rivals = dict[str, list[Method]]
"""By method: its settings, several if they differ by seed."""


def rivals(config: ModelConfig, n_prompt: int, speedup: float, seeds: int) -> Rivals:
    """Every method except dense, at `speedup` for prompts of `n_prompt` tokens.

    Compression, whose own cost is not counted, removes the same share of sentences as random drop of tokens,
    scored as in the code of its authors.
    """
    lazy = Pruning.for_speedup(speedup, config, n_prompt)
    layers = max(1, round(STATIC_DEPTH * config.n_layers))
    share = kept_for(speedup, lambda keep: RandomDrop(keep).speedup(config, n_prompt))
    static = kept_for(speedup, lambda keep: StaticPruning(layers, keep).speedup(config, n_prompt))
    return {
        RANDOM: [RandomDrop(share, seed) for seed in range(seeds)],
        STATIC: [StaticPruning(layers, static)],
        COMPRESSION: [PromptCompression(round(1 - share, 4), by_sentence=True)],
        LAZY: [lazy],
        RECOMMENDED: [lazy.recommended()],
    }


def kept_for(target: float, speedup: Callable[[float], float]) -> float:
    """The largest keep, in steps of KEEP_STEP, that reaches the target speedup."""
    low, high = 1, round(1 / KEEP_STEP)
    if speedup(low * KEEP_STEP) < target:
        raise ValueError(f"a speedup of {target:g} is out of reach for the compared methods")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if speedup(middle * KEEP_STEP) >= target else (low, middle)
    return round((high if speedup(high * KEEP_STEP) >= target else low) * KEEP_STEP, 4)


def all_settings(several: Sequence[Rivals]) -> list[Method]:
    """Dense, then every other setting once."""
    given = [method for one in several for methods in one.values() for method in methods]
    return [Pruning(), *dict.fromkeys(given)]
