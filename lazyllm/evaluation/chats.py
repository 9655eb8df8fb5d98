"""Chat wrappers: the text around a prompt that a chat model expects, as the benchmark's authors wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from lazyllm.support import checked

if TYPE_CHECKING:
    from lazyllm.checkpoints.tokenizer import Tokenizer

Wrapper = Literal["none", "llama-2", "xgen", "template"]
AnyWrapper = Wrapper | Literal["auto"]
WRAPPERS = ("auto", "none", "llama-2", "xgen", "template")
NAMES: Mapping[Wrapper, str] = {"llama-2": r"llama[-_ ]?2(?!\d).*chat", "xgen": r"xgen(?!.*base)"}
XGEN_HEADER = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions.\n\n"
)
XGEN_ASSISTANT = " Assistant:"  # written by the model itself, unless its answer is begun for it


def chat_wrapper(tokenizer: Tokenizer, wrapper: AnyWrapper = "auto") -> Wrapper:
    """The wrapper that is asked for; "auto" selects it by the model.

    "auto" recognises Llama-2-chat and XGen by the checkpoint's folder name or hub id; any other model gets
    its own chat template, or no wrapper if it has none.
    """
    from lazyllm.checkpoints.config import model_name  # imports NumPy, which --help does not need

    checked.choice(wrapper, "wrapper", WRAPPERS)
    if wrapper == "template" and tokenizer.template is None:
        raise ValueError(f"wrapper is 'template', and {tokenizer.place} has no chat template")
    if wrapper != "auto":
        return wrapper
    name = model_name(tokenizer.place).lower()
    named = (family for family, pattern in NAMES.items() if re.search(pattern, name))
    return next(named, "template" if tokenizer.template else "none")


def wrapped_ids(tokenizer: Tokenizer, text: str, wrapper: Wrapper, answer_prefix: str = "") -> list[int]:
    """Token ids of the text inside its wrapper, and of the beginning of the model's answer after it."""
    if wrapper == "template":
        rendered = tokenizer.chat_text([{"role": "user", "content": text}])
        return tokenizer.encode(rendered + answer_prefix, add_special=False)
    if wrapper == "xgen":
        text = f"{XGEN_HEADER} ### Human: {text}\n###"
        if answer_prefix:
            text += XGEN_ASSISTANT
    elif wrapper == "llama-2":
        text = f"[INST]{text}[/INST]"
    return tokenizer.encode(text + answer_prefix)
