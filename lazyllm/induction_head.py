"""The head of the lower layers that finds earlier occurrences of what is being read."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from lazyllm.policy import Policy, View
from lazyllm.pruning import LAYER_LIMIT, Pruning
from lazyllm.schedule import first_stage

if TYPE_CHECKING:
    from lazyllm.llm import LLM

TOKENS, PIECES, LENGTH = 256, 4, 8  # random tokens, then so many pieces of them once more, each of LENGTH tokens
MOST_AHEAD = 0.1
"""The largest share of the other tokens that may draw as much attention as a piece."""


class Found(Exception):
    """Ends the pass when the layers asked for have been seen."""


class Ahead(Policy):
    """Notes for each head the share of the other tokens that the repeated pieces attend to as much as to the place
    where they stood first, or more."""

    layers = LAYER_LIMIT
    queries = PIECES * LENGTH

    def __init__(self, stage: int, begins: np.ndarray) -> None:
        super().__init__(Pruning({stage: 0.5}))
        self._begins, self._top = begins, stage - 1
        self._shares: dict[tuple[int, int], float] = {}

    def observe(self, view: View) -> None:
        attention = view.attention(PIECES * LENGTH).max(axis=1)[:, 1:TOKENS]  # the first token draws it anyway
        ahead = []
        for begin in self._begins:
            places = np.arange(begin - 1, begin - 1 + LENGTH)
            piece, others = attention[:, places].mean(axis=1), np.delete(attention, places, axis=1)
            ahead.append(1 - (others < piece[:, None]).mean(axis=1))  # a NaN is no head's merit
        self._shares |= {(view.layer, head): float(share) for head, share in enumerate(np.mean(ahead, axis=0))}
        if view.layer == self._top:
            raise Found

    def score(self, view: View) -> np.ndarray:
        raise AssertionError("the pass ends below the stage")


def find_induction_head(llm: LLM) -> tuple[int, int] | None:
    """The (layer, head) below the usual first stage, of layers that see the whole context, that looks most surely at
    the earlier occurrence of a piece that is repeated; None if no head does."""
    config = llm.config
    if config.n_layers < 2 or config.context <= TOKENS + PIECES * LENGTH or not (stage := first_stage(config)):
        return None
    random = np.random.default_rng(0)
    ids = random.integers(0, config.vocab, TOKENS)
    begins = np.sort(random.choice(np.arange(1, TOKENS // LENGTH - 1), PIECES, replace=False)) * LENGTH
    pieces = [ids[begin : begin + LENGTH] for begin in begins]
    policy = Ahead(stage, begins)
    with suppress(Found):
        llm.generate(np.concatenate([ids, *pieces]).tolist(), policy, max_new_tokens=1, progress=False)
    seeing = {place: share for place, share in policy._shares.items() if not config.windows[place[0]]}
    best = min(seeing, key=seeing.__getitem__, default=None)
    return best if best is not None and seeing[best] <= MOST_AHEAD else None
