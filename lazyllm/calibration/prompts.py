"""The prompts of a calibration: needles in generated texts and the user's own, some of them kept back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lazyllm.evaluation.chats import chat_wrapper, wrapped_ids
from lazyllm.evaluation.generated.tasks import RULER, GeneratedTasks, prompt_encoder, ruler_items
from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.tasks import ItemPrompt, Shorten, Task
from lazyllm.llm import LLM
from lazyllm.prompt import Prompt as UserPrompt
from lazyllm.prompt import is_messages
from lazyllm.support import checked

NEEDLES = ("niah_single_2", "niah_multikey_1", "niah_multivalue")
LENGTHS = (1024, 2048)  # tokens of a prompt with its answer, unless others are given
MAX_NEW_TOKENS = 48  # of the answers that name needles
FOR_CURVES, FOR_TRIALS = 2, 3  # generated prompts of each kind and length
CURVE_SEED, TRIAL_SEED = 101, 102
OWN = "own prompts"  # the data set of the user's
KEPT_BACK = 3  # every third of the user's


class CalibrationTasks(GeneratedTasks):
    """Generated needles, and prompts given as token ids, which have no score."""

    def __init__(
        self,
        llm: LLM,
        own: Mapping[str, Sequence[int]],
        count: int,
        seed: int,
        options: RunOptions,
        lengths: Sequence[int] | None = None,
    ) -> None:
        lengths = checked_lengths(lengths, llm.config.context)
        encode = prompt_encoder(llm.tokenizer, options.chat)
        items: dict[str, Sequence[dict[str, Any]]] = dict(ruler_items(encode, NEEDLES, lengths, count, seed))
        if own:
            items[OWN] = [{"_id": name, "ids": list(ids)} for name, ids in own.items()]
        selection = {"lengths": lengths, "items of each kind": count, "seed": seed}
        super().__init__(items, RULER, selection, options, MAX_NEW_TOKENS)

    def check(self, llm: LLM) -> None:
        """Checks nothing: the user's prompts are checked by `encoded`, and generated ones fit."""

    def median_tokens(self, llm: LLM) -> int:
        """The median length of the prompts."""
        trials = ((self.task(name), item) for name, items in self.items.items() for item in items)
        return int(np.median([len(self.prompt(llm, task, item).ids) for task, item in trials]))

    def task(self, name: str) -> Task:
        return Task(OWN, OWN, MAX_NEW_TOKENS) if name == OWN else super().task(name)

    def prompt(
        self, llm: LLM, task: Task, item: Mapping[str, Any], shorten: Shorten | None = None
    ) -> ItemPrompt:
        if task.name == OWN:
            return ItemPrompt(item["ids"], len(item["ids"]), False, "none")
        return super().prompt(llm, task, item, shorten)


def checked_lengths(lengths: Sequence[int] | None, context: int) -> list[int]:
    """The lengths, ascending; None is LENGTHS, as far as the model's context has room."""
    if lengths is None:
        return sorted({min(length, context) for length in LENGTHS})
    checked.a_list(lengths, "lengths", "[1024, 2048]")
    if not len(lengths):
        raise ValueError("lengths must be at least one number of tokens")
    ascending = sorted({checked.whole(length, "a length", 1) for length in lengths})
    if ascending[-1] > context:
        raise ValueError(f"length {ascending[-1]} is more than the model's context of {context}")
    return ascending


def encoded(llm: LLM, prompts: Sequence[UserPrompt], new_tokens: int) -> dict[str, list[int]]:
    """The token ids of the user's prompts by name, each with room for an answer.

    Text goes through the model's chat template, where it has one, as chat messages do; ids stay as they are.
    """
    ids_by_name: dict[str, list[int]] = {}
    session = llm.session()
    for number, prompt in enumerate(prompts, 1):
        name = f"prompt {number}"
        try:
            if isinstance(prompt, str) and prompt:
                ids = wrapped_ids(llm.tokenizer, prompt, chat_wrapper(llm.tokenizer))
            else:
                ids = session.conversation.encode(session.core, prompt, is_messages(prompt)).ids
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        if len(ids) + new_tokens > llm.config.context:
            raise ValueError(
                f"{name} has {len(ids)} tokens; with {new_tokens} of an answer it must fit into the model's "
                f"context of {llm.config.context}"
            )
        ids_by_name[name] = ids
    return ids_by_name


def split(own: Mapping[str, list[int]]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The user's prompts for curves, and those kept back: every third."""
    names = list(own)
    kept_back = names[KEPT_BACK - 1 :: KEPT_BACK]
    return {name: own[name] for name in names if name not in kept_back}, {
        name: own[name] for name in kept_back
    }
