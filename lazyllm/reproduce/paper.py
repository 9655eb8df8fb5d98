"""The methods and figures of the paper, and later methods: Fu et al. 2024, arXiv 2407.14057, version 1."""

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from csv import DictReader
from dataclasses import replace
from importlib.resources import files
from typing import Any, NamedTuple

from lazyllm.checkpoints.config import ModelConfig, model_name
from lazyllm.evaluation.chats import AnyWrapper
from lazyllm.llm import LLM
from lazyllm.method import Method
from lazyllm.methods.compression import PromptCompression
from lazyllm.methods.rivals import CLAA, FastKV, GemFilter, RandomDrop, StaticPruning
from lazyllm.pruning import Pruning, Scheduled
from lazyllm.schedule import Shapes, seeing_layers

PAPER_COLUMNS = ("score", "TTFT speedup", "prompt computed", "generation speedup")
"""The columns of Table 1, and of Table 2 for LazyLLM."""
Published = Mapping[tuple[str, str], Mapping[str, str]]
"""By category and method: the cells of PAPER_COLUMNS; empty for other models."""


class PaperSetup(NamedTuple):
    """`max_length` in prompt tokens and `wrapper` are those of LongBench's authors.

    `speedup` of the first token is the paper's mean for LazyLLM over the six categories; the paper gives
    neither layers nor keeps. `paper_model`: the paper's name of the model. That its Llama 2 is the chat model
    is our reading: its baseline is near LongBench's own figures for Llama2-7B-chat-4k.
    """

    max_length: int = 3500
    speedup: float = 2.0
    wrapper: AnyWrapper = "auto"
    paper_model: str | None = None

    @property
    def published(self) -> Published:
        with (files("lazyllm.reproduce") / "published.csv").open(encoding="utf-8") as file:
            rows = [row for row in DictReader(file) if row.pop("model") == self.paper_model]
        return {
            (row["category"], method): dict(zip(PAPER_COLUMNS, cells.split(), strict=False))
            for row in rows
            for method, cells in [*row.items()][1:]
        }


OTHER = "other"
SETUPS = {
    "llama-2-7b-chat": PaperSetup(3500, 2.0, "llama-2", "Llama 2 7B"),
    "xgen-7b-8k-inst": PaperSetup(7500, 3.0, "xgen", "XGen 7B"),
    OTHER: PaperSetup(),
}


def preset_of(llm: LLM) -> str:
    """The name in SETUPS that is in the checkpoint's, however it is spelled: llama2_7B-chat is
    llama-2-7b-chat."""
    spelled = re.sub("[-_ ]", "", model_name(llm.checkpoint.path).lower())
    return next((name for name in SETUPS if name.replace("-", "") in spelled), OTHER)


BASELINE, LAZY, RECOMMENDED = "Baseline", "LazyLLM", "LazyLLM, recommended"
METHODS = {
    "random": "Random Token Drop",
    "static": "Static Token Pruning",
    "compress": "Prompt Compression",
    "fastkv": "FastKV",
    "claa": "CLAA",
    "gemfilter": "GemFilter",
    "lazyllm": LAZY,
    "recommended": RECOMMENDED,
}
"""By the method's short name: its name in tables."""
STATIC_DEPTH = 1 / 8  # share of the layers that run before static pruning: 4 of 32
# of LazyLLM's stages, which the paper does not give: its rule loses less in later layers, with falling keeps
LAZY_SHAPES: Shapes = (
    ({0.30: 1, 0.50: 0.46, 0.75: 0.21}, 0.25),
    ({0.20: 1, 0.40: 0.46, 0.60: 0.21}, 0.25),
    ({0.10: 1, 0.25: 0.46, 0.40: 0.21}, 0.0),
)
N_STEPS = 10_000  # of the keeps


def rivals(
    config: ModelConfig, n_prompt: int, speedup: float, seeds: int, names: Collection[str] = METHODS
) -> dict[str, Sequence[Method]]:
    """By method of `names`, as tables have it: its settings, several if they differ by seed, at `speedup` for
    prompts of `n_prompt` tokens.

    Compression, whose own cost is not counted, removes the same share of sentences as random drop of tokens.
    """

    def is_fast(method: Scheduled) -> bool:
        return method.speedup(config, n_prompt) >= speedup

    def slowest(method: Callable[..., Any], *arguments: Any) -> Any:
        """The method with the largest keep, in steps, that reaches the speedup."""

        def kept(step: int) -> Any:
            return method(*arguments, (step + 1) / N_STEPS)

        n_fast = bisect_right(range(N_STEPS), 0, key=lambda step: not is_fast(kept(step)))
        if not n_fast:
            raise ValueError(f"a speedup of {speedup:g} is out of reach for the compared methods")
        return kept(n_fast - 1)

    def highest(method: Callable[[int, float], Scheduled], depth: float, least: float) -> Any:
        """The method at the highest layer up to `depth` at which it need not keep less than `least`. In a
        model with sliding windows, only layers that see all of the context are taken."""
        layers = seeing_layers(config, min(round(depth * config.n_layers), config.n_layers - 2))
        layer = max((layer for layer in layers if is_fast(method(layer, least))), default=layers[0])
        return slowest(method, layer)

    # depths are of the authors' code, as shares of its model's 32 layers, and so are the least keeps: 0.2 for
    # FastKV; 1024 tokens for GemFilter, about a tenth of LongBench's prompts; both not known for CLAA
    makers: dict[str, Callable[[], Sequence[Method]]] = {
        "random": lambda: [replace(slowest(RandomDrop), seed=seed) for seed in range(seeds)],
        "static": lambda: [slowest(StaticPruning, max(0, round(STATIC_DEPTH * config.n_layers) - 1))],
        "compress": lambda: [PromptCompression(round(1 - slowest(RandomDrop).keep, 4))],
        "fastkv": lambda: [highest(FastKV, 15 / 32, 0.2)],
        "claa": lambda: [highest(CLAA, 15 / 32, 0.2)],
        "gemfilter": lambda: [highest(GemFilter, 13 / 32, 0.1)],
        "lazyllm": lambda: [Pruning.for_speedup(speedup, config, n_prompt, "paper", LAZY_SHAPES)],
        "recommended": lambda: [Pruning.for_speedup(speedup, config, n_prompt)],
    }
    return {METHODS[name]: maker() for name, maker in makers.items() if name in names}
