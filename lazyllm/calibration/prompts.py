"""The prompts of calibrations and searches: needles in generated texts, and the user's own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lazyllm.evaluation.chats import chat_wrapper, wrapped_ids
from lazyllm.evaluation.generated.tasks import GeneratedTasks
from lazyllm.evaluation.measures import TOKENS
from lazyllm.evaluation.options import RulerOptions
from lazyllm.evaluation.tasks import ItemPrompt, Shorten
from lazyllm.generation import Request
from lazyllm.llm import LLM
from lazyllm.prompt import Prompt as UserPrompt

NEEDLES = ("niah_single_2", "niah_multikey_1", "niah_multivalue")
LENGTHS = (1024, 2048)  # tokens of a prompt with its answer, by default
MAX_NEW_TOKENS = 48  # of the answers that name needles
OWN = "own prompts"  # name of the data set of the user's prompts


class CalibrationTasks(GeneratedTasks):
    """Generated needles, `count` of each kind and length, and the user's own prompts, which have no score.

    `lengths`: None means LENGTHS, each limited to the model's context.
    """

    def __init__(
        self, llm: LLM, prompts: Sequence[UserPrompt], count: int, seed: int, lengths: Sequence[int] | None = None
    ) -> None:
        own_ids = encoded(llm, prompts)
        if lengths is None:
            lengths = sorted({min(length, llm.config.context) for length in LENGTHS})
        super().__init__(llm, RulerOptions(tasks=NEEDLES, lengths=lengths, count=count, seed=seed), MAX_NEW_TOKENS)
        if own_ids:
            self.items[OWN] = [{"_id": name, "ids": ids, "length": len(ids)} for name, ids in own_ids.items()]
        self.check(llm)
        self.ids = [self.prompt(llm, name, item).ids for name, items in self.items.items() for item in items]
        """The token ids of all prompts."""
        self.median_length = int(np.median([len(ids) for ids in self.ids]))

    def request(self, llm: LLM, name: str) -> Request:
        return Request(MAX_NEW_TOKENS, progress=False) if name == OWN else super().request(llm, name)

    def prompt(self, llm: LLM, name: str, item: Mapping[str, Any], shorten: Shorten | None = None) -> ItemPrompt:
        if name == OWN:
            return ItemPrompt(item["ids"], False, "none")
        return super().prompt(llm, name, item, shorten)


def encoded(llm: LLM, prompts: Sequence[UserPrompt]) -> dict[str, list[int]]:
    """The token ids of the user's prompts by name, each with room for an answer of TOKENS.

    Text goes through the model's chat template, where it has one, as chat messages do; ids stay as they are.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of prompts, not one text")
    ids_by_name: dict[str, list[int]] = {}
    session = llm.session()
    for number, prompt in enumerate(prompts, 1):
        name = f"prompt {number}"
        try:
            if isinstance(prompt, str) and prompt:
                ids = wrapped_ids(llm.tokenizer, prompt, chat_wrapper(llm.tokenizer))
            else:
                ids = session.encode(prompt).ids
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        if len(ids) + TOKENS > llm.config.context:
            raise ValueError(
                f"{name} has {len(ids)} tokens; with {TOKENS} of an answer it must fit into the model's "
                f"context of {llm.config.context}"
            )
        ids_by_name[name] = ids
    return ids_by_name
