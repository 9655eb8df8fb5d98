"""The prompts of calibrations and searches: needles in generated texts, and the user's own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lazyllm.evaluation.generated.tasks import GeneratedTasks
from lazyllm.evaluation.measures import TOKENS
from lazyllm.evaluation.options import RulerOptions
from lazyllm.evaluation.own_prompts import OWN, OwnPrompts
from lazyllm.evaluation.tasks import ItemPrompt, Shorten
from lazyllm.generation import Request
from lazyllm.llm import LLM
from lazyllm.prompt import Prompt

NEEDLES = ("niah_single_2", "niah_multikey_1", "niah_multivalue")
LENGTHS = (1024, 2048)  # tokens of a prompt with its answer, by default
MAX_NEW_TOKENS = 48  # of the answers that name needles


class CalibrationTasks(GeneratedTasks):
    """Generated needles, `count` of each kind and length, and the user's own prompts.

    `lengths`: None means LENGTHS, each limited to the model's context.
    """

    def __init__(
        self, llm: LLM, prompts: Sequence[Prompt], count: int, seed: int, lengths: Sequence[int] | None = None
    ) -> None:
        self._own = OwnPrompts(llm, prompts, TOKENS)
        if lengths is None:
            lengths = sorted({min(length, llm.config.context) for length in LENGTHS})
        super().__init__(llm, RulerOptions(tasks=NEEDLES, lengths=lengths, count=count, seed=seed), MAX_NEW_TOKENS)
        if prompts:
            self.items |= self._own.items
            self._own.items = {}
        self.check(llm)
        self.ids = [self.prompt(llm, name, item).ids for name, items in self.items.items() for item in items]
        """The token ids of all prompts."""
        self.median_length = int(np.median([len(ids) for ids in self.ids]))

    def request(self, llm: LLM, name: str) -> Request:
        return self._own.request(llm, name) if name == OWN else super().request(llm, name)

    def prompt(self, llm: LLM, name: str, item: Mapping[str, Any], shorten: Shorten | None = None) -> ItemPrompt:
        if name == OWN:
            return self._own.prompt(llm, name, item)
        return super().prompt(llm, name, item, shorten)
