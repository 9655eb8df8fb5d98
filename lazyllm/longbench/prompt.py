"""The token ids that a model is given for an item, and where its answer ends: LongBench's rules 1 to 5."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lazyllm.config import model_name
from lazyllm.longbench.datasets import dataset
from lazyllm.longbench.items import check_whole, is_text
from lazyllm.longbench.templates import Templates, find_templates
from lazyllm.tokenizer import Tokenizer

Wrapper = Literal["none", "llama-2", "xgen", "template"]
Chat = Wrapper | Literal["auto"]
CHATS = ("auto", "none", "llama-2", "xgen", "template")
MAX_LENGTH = 3500  # of the prompt without its wrapper, for models with a context of 4096
LLAMA_2_CHAT = re.compile(r"llama[-_ ]?2(?!\d).*chat")
XGEN_CHAT = re.compile(r"xgen(?!.*base)")
XGEN_HEADER = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions.\n\n"
)


@dataclass(frozen=True)
class Prompt:
    """`n_tokens_unwrapped` counts the formatted item, before it was `cut` to max_length and wrapped."""

    ids: list[int]
    n_tokens_unwrapped: int
    cut: bool
    wrapper: Wrapper


@dataclass(frozen=True)
class Stops:
    """Any of `ids` ends the answer; as its first token, none of `never_first` may be chosen."""

    ids: tuple[int, ...]
    never_first: tuple[int, ...] = ()


def prompt_ids(
    tokenizer: Tokenizer,
    item: Mapping[str, Any],
    max_length: int = MAX_LENGTH,
    chat: Chat = "auto",
    templates: Templates | None = None,
) -> list[int]:
    """The ids that the model is given for one item, a dict as in LongBench's files.

    A prompt of more than `max_length` tokens loses its middle. `chat` wraps it: "llama-2", "xgen", "template"
    (the checkpoint's own), "none", or "auto" by the checkpoint. `templates` are looked for in the folder that
    LAZYLLM_LONGBENCH names.
    """
    return make_prompt(tokenizer, item, max_length, chat, templates).ids


def make_prompt(
    tokenizer: Tokenizer,
    item: Mapping[str, Any],
    max_length: int = MAX_LENGTH,
    chat: Chat = "auto",
    templates: Templates | None = None,
) -> Prompt:
    """As `prompt_ids`, with what happened on the way."""
    check(item)
    check_whole("max_length", max_length, least=2)
    wrapper = chat_wrapper(tokenizer, chat) if dataset(item["dataset"]).chat else "none"
    text = (templates or find_templates()).prompt(item)
    ids = tokenizer.encode(text)
    n_tokens = len(ids)
    if cut := n_tokens > max_length:
        half = int(max_length / 2)
        text = tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])
        ids = tokenizer.encode(text)
    return Prompt(wrapped(tokenizer, text, wrapper) if wrapper != "none" else ids, n_tokens, cut, wrapper)


def check(item: Mapping[str, Any]) -> None:
    if not isinstance(item, Mapping):
        raise TypeError(f"an item must be a dict as in LongBench's files, not {type(item).__name__}")
    for field in ("dataset", "input", "context"):
        if not is_text(item.get(field)):
            raise ValueError(f"item: {field} is {item.get(field)!r:.80}; expected a string")


# ---- chats ---------------------------------------------------------------------------------------


def chat_wrapper(tokenizer: Tokenizer, chat: Chat = "auto") -> Wrapper:
    """The wrapper that the model's prompts get: `chat` itself, or for "auto" the one that the model needs.

    Llama-2-chat and XGen are known by the name of the checkpoint's folder or its hub id.
    """
    if chat not in CHATS:
        raise ValueError(f"chat must be one of {', '.join(CHATS)}, not {chat!r}")
    if chat == "template" and not tokenizer.has_chat_template:
        raise ValueError(f"chat is 'template', and {tokenizer.source.parent} has no chat template")
    if chat != "auto":
        return chat
    name = model_name(tokenizer.source.parent).lower()
    if LLAMA_2_CHAT.search(name):
        return "llama-2"
    if XGEN_CHAT.search(name):
        return "xgen"
    return "template" if tokenizer.has_chat_template else "none"


def wrapped(tokenizer: Tokenizer, text: str, wrapper: Wrapper) -> list[int]:
    if wrapper == "template":
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])
    if wrapper == "xgen":
        return tokenizer.encode(f"{XGEN_HEADER} ### Human: {text}\n###")
    return tokenizer.encode(f"[INST]{text}[/INST]")


# ---- answers -------------------------------------------------------------------------------------


def post_process(wrapper: Wrapper, text: str) -> str:
    """The answer as it is scored; `wrapper` is the model's, even where the data set's prompts go without."""
    return text.strip().replace("Assistant:", "") if wrapper == "xgen" else text


def stops(name: str, tokenizer: Tokenizer) -> Stops:
    """Where an answer to an item of the data set `name` ends, besides its most new tokens."""
    ends = tokenizer.eos_token_ids
    if not dataset(name).stop_at_newline:
        return Stops(ends)
    both = (*ends, tokenizer.encode("\n", add_special=False)[-1])
    return Stops(both, never_first=both)
