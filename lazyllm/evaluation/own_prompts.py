"""A user's own prompts for the runner. They have no score: what a setting loses on them is its divergence."""

from collections.abc import Mapping, Sequence
from typing import Any

from lazyllm.evaluation.chats import AnyWrapper, chat_wrapper, wrapped_ids
from lazyllm.evaluation.tasks import ItemPrompt, Shorten, Tasks
from lazyllm.generation import Request
from lazyllm.llm import LLM
from lazyllm.prompt import Prompt
from lazyllm.support import checked

OWN = "own prompts"  # name of the data set


class OwnPrompts(Tasks):
    """Prompts, each with room in the context for an answer of so many tokens."""

    conditions: Mapping[str, Any] = {"tasks": OWN}

    def __init__(self, llm: LLM, prompts: Sequence[Prompt], tokens: int, wrapper: AnyWrapper = "auto") -> None:
        ids_by_name = encoded(llm, prompts, wrapper)
        for name, ids in ids_by_name.items():
            if len(ids) + tokens > llm.config.context:
                raise ValueError(
                    f"{name} has {len(ids)} tokens; with {tokens} of an answer it must fit into the model's "
                    f"context of {llm.config.context}"
                )
        self.items: dict[str, list[dict[str, Any]]] = {}
        self.items[OWN] = [{"_id": name, "ids": ids, "length": len(ids)} for name, ids in ids_by_name.items()]
        self.selection = {"prompts": len(ids_by_name)}
        self.wrapper, self._tokens = wrapper, tokens

    def request(self, llm: LLM, name: str) -> Request:
        return Request(self._tokens, progress=False)

    def prompt(self, llm: LLM, name: str, item: Mapping[str, Any], shorten: Shorten | None = None) -> ItemPrompt:
        return ItemPrompt(item["ids"], False, "none")

    def score(self, name: str, prediction: str, item: Mapping[str, Any]) -> dict[str, float]:
        return {}


def encoded(llm: LLM, prompts: Sequence[Prompt], wrapper: AnyWrapper = "auto") -> dict[str, list[int]]:
    """The token ids of the user's prompts by name.

    Text gets the wrapper, by default the model's chat template, where it has one, as chat messages do; ids stay as
    they are.
    """
    checked.a_list(prompts, "prompts", '["a text"]')
    ids_by_name: dict[str, list[int]] = {}
    session = llm.session()
    for number, prompt in enumerate(prompts, 1):
        name = f"prompt {number}"
        try:
            if isinstance(prompt, str) and prompt:
                ids = wrapped_ids(llm.tokenizer, prompt, chat_wrapper(llm.tokenizer, wrapper))
            else:
                ids = session.encode(prompt).ids
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        ids_by_name[name] = ids
    return ids_by_name
