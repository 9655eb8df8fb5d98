"""The methods that the paper compares, and later ones, at settings of equal speedup by counted operations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from lazyllm.method import Method
from lazyllm.methods import CLAA, FastKV, GemFilter, PromptCompression, RandomDrop, StaticPruning
from lazyllm.methods.one_stage import OneStage
from lazyllm.pruning import SPEEDUP_SHAPES, Pruning, Shapes, seeing_layers

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig

BASELINE, RANDOM, STATIC = "Baseline", "Random Token Drop", "Static Token Pruning"
COMPRESSION, LAZY, RECOMMENDED = "Prompt Compression", "LazyLLM", "LazyLLM, recommended"
FASTKV, CLAA_ROW, GEMFILTER = "FastKV", "CLAA", "GemFilter"
METHODS = {
    **{"random": RANDOM, "static": STATIC, "compress": COMPRESSION},
    **{"fastkv": FASTKV, "claa": CLAA_ROW, "gemfilter": GEMFILTER},
    **{"lazyllm": LAZY, "recommended": RECOMMENDED},
}
"""The methods by their short names."""
STATIC_DEPTH = 1 / 8  # share of the layers that run before static pruning: 4 of 32
# of LazyLLM's stages, which the paper does not give: its rule loses less in later layers, with falling keeps
LAZY_SHAPES: Shapes = (
    ({0.30: 1, 0.50: 0.46, 0.75: 0.21}, 0.25),
    ({0.20: 1, 0.40: 0.46, 0.60: 0.21}, 0.25),
    ({0.10: 1, 0.25: 0.46, 0.40: 0.21}, 0.0),
)
N_STEPS = 10_000  # of the keeps
# by method: the layer in the authors' code, as a share of its model's 32, and the least keep. Theirs is 0.2
# for FastKV; 1024 tokens for GemFilter, about a tenth of LongBench's prompts; not known for CLAA
ONE_STAGE: dict[type[OneStage], tuple[float, float]] = {
    FastKV: (15 / 32, 0.2),
    CLAA: (15 / 32, 0.2),
    GemFilter: (13 / 32, 0.1),
}


def rivals(
    config: ModelConfig, n_prompt: int, speedup: float, seeds: int, names: Collection[str] = METHODS
) -> dict[str, list[Method]]:
    """By method of `names`: its settings, several if they differ by seed, at `speedup` for prompts of
    `n_prompt` tokens.

    Compression, whose own cost is not counted, removes the same share of sentences as random drop of tokens.
    """
    layers = max(1, round(STATIC_DEPTH * config.n_layers))

    def dropping() -> float:
        return kept_for(speedup, lambda keep: RandomDrop(keep).speedup(config, n_prompt))

    def static() -> float:
        return kept_for(speedup, lambda keep: StaticPruning(layers, keep).speedup(config, n_prompt))

    def recommended(schedule: Pruning) -> Pruning:
        return schedule.recommended(n_prompt)

    makers: dict[str, Callable[[], Sequence[Method]]] = {
        RANDOM: lambda: [RandomDrop(keep, seed) for keep in (dropping(),) for seed in range(seeds)],
        STATIC: lambda: [StaticPruning(layers, static())],
        COMPRESSION: lambda: [PromptCompression(round(1 - dropping(), 4))],
        FASTKV: lambda: [one_stage(FastKV, config, n_prompt, speedup)],
        CLAA_ROW: lambda: [one_stage(CLAA, config, n_prompt, speedup)],
        GEMFILTER: lambda: [one_stage(GemFilter, config, n_prompt, speedup)],
        LAZY: lambda: [Pruning.of_shapes(LAZY_SHAPES, speedup, config, n_prompt)],
        RECOMMENDED: lambda: [Pruning.of_shapes(SPEEDUP_SHAPES, speedup, config, n_prompt, recommended)],
    }
    return {row: [*makers[row]()] for name, row in METHODS.items() if name in names}


def one_stage(method: type[OneStage], config: ModelConfig, n_prompt: int, speedup: float) -> OneStage:
    """The method at the highest layer that reaches `speedup` with its least keep or more, up to its authors'.

    In a model with sliding windows, only layers that see all of the context are taken.
    """
    depth, least = ONE_STAGE[method]
    top = min(round(depth * config.n_layers), config.n_layers - 2)
    layers = seeing_layers(config, top)
    fast = [layer for layer in layers if method(layer, least).speedup(config, n_prompt) >= speedup]
    layer = max(fast, default=layers[0])
    return method(layer, kept_for(speedup, lambda keep: method(layer, keep).speedup(config, n_prompt)))


def kept_for(target: float, speedup: Callable[[float], float]) -> float:
    """The largest keep, in steps, that reaches the target speedup."""
    steps = range(1, N_STEPS + 1)
    n_fast = bisect_right(steps, -target, key=lambda step: -speedup(step / N_STEPS))
    if not n_fast:
        raise ValueError(f"a speedup of {target:g} is out of reach for the compared methods")
    return n_fast / N_STEPS
