"""The paper's results: Figure 1, Tables 1 and 2 of Fu et al. 2024, arXiv 2407.14057, version 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lazyllm.reproduce.rivals import BASELINE, COMPRESSION, LAZY, RANDOM, STATIC


class Accuracy(NamedTuple):
    score: float
    speedup: float  # of the first token


class Work(NamedTuple):
    computed: float  # percent of the prompt's tokens
    speedup: float  # of the whole answer


class FirstToken(NamedTuple):
    """Means over LongBench."""

    prompt_tokens: float
    new_tokens: float
    steps: float  # its time in decode steps
    share: float  # of the time of the answer, in percent


@dataclass(frozen=True)
class Published:
    accuracy: Mapping[tuple[str, str], Accuracy]  # by category and method
    work: Mapping[str, Work]  # by category, of LazyLLM


METHODS = (BASELINE, RANDOM, STATIC, COMPRESSION, LAZY)

Row = tuple[tuple[float, float], ...]
LLAMA: dict[str, Row] = {
    "Single-Document QA": ((25.79, 1.00), (20.05, 1.20), (21.89, 1.18), (22.88, 0.12), (25.59, 1.36)),
    "Multi-Document QA": ((22.43, 1.00), (16.77, 1.19), (19.93, 2.16), (8.42, 0.13), (22.31, 2.34)),
    "Summarization": ((24.65, 1.00), (24.39, 1.39), (24.59, 1.33), (25.16, 0.12), (24.75, 1.46)),
    "Few-shot Learning": ((62.90, 1.00), (53.93, 1.19), (56.54, 2.16), (24.18, 0.10), (62.81, 2.19)),
    "Synthetic": ((4.97, 1.00), (3.57, 1.18), (2.81, 2.15), (3.20, 0.12), (4.98, 2.89)),
    "Code Completion": ((55.18, 1.00), (44.92, 1.23), (37.51, 1.84), (17.45, 0.49), (53.30, 1.94)),
}
XGEN: dict[str, Row] = {
    "Single-Document QA": ((25.19, 1.00), (18.32, 1.58), (19.30, 1.61), (15.31, 0.20), (25.00, 1.96)),
    "Multi-Document QA": ((20.71, 1.00), (14.86, 1.37), (17.23, 2.11), (11.56, 0.19), (20.68, 2.65)),
    "Summarization": ((24.85, 1.00), (24.47, 1.70), (24.46, 1.65), (24.57, 0.17), (24.74, 1.91)),
    "Few-shot Learning": ((56.40, 1.00), (46.35, 1.62), (51.93, 3.17), (23.72, 0.15), (56.12, 3.42)),
    "Synthetic": ((5.40, 1.00), (2.53, 1.13), (3.00, 4.14), (1.42, 0.17), (5.66, 4.77)),
    "Code Completion": ((36.49, 1.00), (32.34, 1.57), (32.27, 2.97), (11.38, 0.69), (36.47, 3.47)),
}
LLAMA_WORK = {
    "Single-Document QA": (87.31, 1.34),
    "Multi-Document QA": (63.94, 1.56),
    "Summarization": (99.59, 1.02),
    "Few-shot Learning": (69.98, 1.28),
    "Synthetic": (63.73, 1.79),
    "Code Completion": (68.57, 1.01),
}
XGEN_WORK = {
    "Single-Document QA": (89.16, 1.33),
    "Multi-Document QA": (69.60, 1.70),
    "Summarization": (96.11, 1.09),
    "Few-shot Learning": (65.30, 1.59),
    "Synthetic": (40.54, 3.16),
    "Code Completion": (72.61, 1.16),
}
FIRST_TOKEN = FirstToken(3376, 68, 21, 23)  # Figure 1, Llama 2 7B


def published(accuracy: Mapping[str, Row], work: Mapping[str, tuple[float, float]]) -> Published:
    return Published(
        {
            (category, method): Accuracy(*pair)
            for category, row in accuracy.items()
            for method, pair in zip(METHODS, row, strict=True)
        },
        {category: Work(*pair) for category, pair in work.items()},
    )


BY_MODEL = {"Llama 2 7B": published(LLAMA, LLAMA_WORK), "XGen 7B": published(XGEN, XGEN_WORK)}
