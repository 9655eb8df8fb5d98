"""The prompts of calibrations and searches: needles in generated texts, and the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lazyllm.evaluation.chats import chat_wrapper, wrapped_ids
from lazyllm.evaluation.generated.tasks import GeneratedTasks
from lazyllm.evaluation.options import RulerOptions
from lazyllm.evaluation.tasks import ItemPrompt, Shorten
from lazyllm.generation import Request
from lazyllm.llm import LLM
from lazyllm.prompt import Prompt as UserPrompt

NEEDLES = ("niah_single_2", "niah_multikey_1", "niah_multivalue")
LENGTHS = (1024, 2048)  # tokens of a prompt with its answer, unless others are given
MAX_NEW_TOKENS = 48  # of the answers that name needles
OWN = "own prompts"  # the data set of the user's


class CalibrationTasks(GeneratedTasks):
    """Generated needles, `count` of each kind and length, and prompts given as token ids, without score."""

    def __init__(
        self,
        llm: LLM,
        own: Mapping[str, Sequence[int]],
        count: int,
        seed: int,
        lengths: Sequence[int] | None = None,
    ) -> None:
        if lengths is None:
            lengths = sorted({min(length, llm.config.context) for length in LENGTHS})
        options = RulerOptions(tasks=NEEDLES, lengths=lengths, count=count, seed=seed)
        super().__init__(llm, options, MAX_NEW_TOKENS)
        self.check(llm)
        if own:
            self.items[OWN] = [
                {"_id": name, "ids": list(ids), "length": len(ids)} for name, ids in own.items()
            ]

    def ids_by_kind(self, llm: LLM) -> list[list[list[int]]]:
        """The token ids of the prompts of each data set."""
        return [[self.prompt(llm, name, item).ids for item in items] for name, items in self.items.items()]

    def request(self, llm: LLM, name: str) -> Request:
        return Request(MAX_NEW_TOKENS, progress=False) if name == OWN else super().request(llm, name)

    def prompt(
        self, llm: LLM, name: str, item: Mapping[str, Any], shorten: Shorten | None = None
    ) -> ItemPrompt:
        if name == OWN:
            return ItemPrompt(item["ids"], False, "none")
        return super().prompt(llm, name, item, shorten)


def encoded(llm: LLM, prompts: Sequence[UserPrompt], new_tokens: int) -> dict[str, list[int]]:
    """The token ids of the user's prompts by name, each with room for an answer.

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
        if len(ids) + new_tokens > llm.config.context:
            raise ValueError(
                f"{name} has {len(ids)} tokens; with {new_tokens} of an answer it must fit into the model's "
                f"context of {llm.config.context}"
            )
        ids_by_name[name] = ids
    return ids_by_name
