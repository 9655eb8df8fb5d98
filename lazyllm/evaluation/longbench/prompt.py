"""The prompt of a LongBench item and the tokens that end its answer, by the official harness' rules."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import commonprefix
from typing import Any

from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.evaluation.chats import Chat, chat_wrapper, wrapped_ids
from lazyllm.evaluation.longbench.datasets import dataset
from lazyllm.evaluation.longbench.items import is_text
from lazyllm.evaluation.longbench.templates import Templates, find_templates
from lazyllm.evaluation.options import MAX_LENGTH
from lazyllm.evaluation.tasks import ItemPrompt, Shorten, Stops
from lazyllm.support import checked


def prompt_ids(
    tokenizer: Tokenizer,
    item: Mapping[str, Any],
    max_length: int = MAX_LENGTH,
    chat: Chat = "auto",
    templates: Templates | None = None,
) -> list[int]:
    """The token ids of one item, a dict with the fields of LongBench's files.

    A prompt of more than `max_length` tokens loses its middle. `chat` is the wrapper: "llama-2", "xgen",
    "template" (the checkpoint's own), "none", or "auto" by the checkpoint. `templates` are the official ones
    unless they are given.
    """
    return make_prompt(tokenizer, item, max_length, chat, templates).ids


def make_prompt(
    tokenizer: Tokenizer,
    item: Mapping[str, Any],
    max_length: int = MAX_LENGTH,
    chat: Chat = "auto",
    templates: Templates | None = None,
    shorten: Shorten | None = None,
) -> ItemPrompt:
    """`prompt_ids`, with the original length, whether the prompt was cut, and its wrapper.

    `shorten` compresses what the cut has left of the context.
    """
    check(item)
    checked.whole(max_length, "max_length", 2)
    wrapper = chat_wrapper(tokenizer, chat) if dataset(item["dataset"]).chat else "none"
    templates = templates or find_templates()
    text = templates.prompt(item)
    ids = tokenizer.encode(text)
    n_tokens = len(ids)
    if cut := n_tokens > max_length:
        half = int(max_length / 2)
        text = tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])
    if shorten:
        text = with_shorter_context(text, *templates.around(item), shorten)
    if cut or shorten:
        ids = tokenizer.encode(text)
    return ItemPrompt(
        ids if wrapper == "none" else wrapped_ids(tokenizer, text, wrapper), n_tokens, cut, wrapper
    )


def with_shorter_context(text: str, before: str, after: str, shorten: Shorten) -> str:
    """The prompt with the text between `before` and `after` shortened; a cut may have shortened those too."""
    before = commonprefix([text, before])  # noqa: RUF071
    rest = text.removeprefix(before)
    after = commonprefix([rest[::-1], after[::-1]])[::-1]  # noqa: RUF071
    return before + shorten(rest.removesuffix(after)) + after


def check(item: Mapping[str, Any]) -> None:
    if not isinstance(item, Mapping):
        raise TypeError(f"an item must be a dict as in LongBench's files, not {type(item).__name__}")
    for field in ("dataset", "input", "context"):
        if not is_text(item.get(field)):
            raise ValueError(f"item: {field} is {item.get(field)!r:.80}; expected a string")


def stops(name: str, tokenizer: Tokenizer) -> Stops:
    """The tokens that end an answer to an item of the data set `name`, and those that cannot begin it."""
    ends = tokenizer.eos_token_ids
    if not dataset(name).stop_at_newline:
        return Stops(ends)
    ends = (*ends, tokenizer.encode("\n", add_special=False)[-1])
    return Stops(ends, never_first=ends)
