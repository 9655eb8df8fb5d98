"""PaperSetup: prompt length, chat wrapper and speedup for the paper's comparisons on a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazyllm.checkpoints.config import model_name
from lazyllm.evaluation.chats import Chat

if TYPE_CHECKING:
    from lazyllm.llm import LLM


@dataclass(frozen=True)
class PaperSetup:
    """`max_length` in prompt tokens and `chat`, the wrapper, are those of LongBench's authors.

    `speedup` of the first token is the paper's mean for LazyLLM over the six categories; the paper gives
    neither layers nor keeps. `paper_model`: the paper's name of the model. That its Llama 2 is the chat model
    is our reading: its baseline is near LongBench's own figures for Llama2-7B-chat-4k.
    """

    name: str
    known_by: re.Pattern[str]
    max_length: int
    speedup: float
    chat: Chat = "auto"
    paper_model: str | None = None


SETUPS = {
    one.name: one
    for one in (
        PaperSetup(
            "llama-2-7b-chat", re.compile(r"llama[-_ ]?2[-_ ]7b[-_ ]chat"), 3500, 2.0, "llama-2", "Llama 2 7B"
        ),
        PaperSetup(
            "xgen-7b-8k-inst", re.compile(r"xgen[-_ ]7b[-_ ]8k[-_ ]inst"), 7500, 3.0, "xgen", "XGen 7B"
        ),
        PaperSetup("smollm2-135m-instruct", re.compile(r"smollm2[-_ ]135m[-_ ]instruct"), 3500, 2.0),
    )
}
OTHER = PaperSetup("for other models", re.compile(""), 3500, 2.0)


def setup_of(llm: LLM, name: str | None) -> PaperSetup:
    """The setup of that name; None selects by the checkpoint's name."""
    if name is None:
        known = model_name(llm.checkpoint.path).lower()
        return next((one for one in SETUPS.values() if one.known_by.search(known)), OTHER)
    if name not in SETUPS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(SETUPS)}")
    return SETUPS[name]
