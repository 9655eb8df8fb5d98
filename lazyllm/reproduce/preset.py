"""Presets: what belongs to a model when the paper's comparisons are run on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazyllm.config import model_name
from lazyllm.longbench.prompt import Chat

if TYPE_CHECKING:
    from lazyllm.llm import LLM


@dataclass(frozen=True)
class Preset:
    """What the paper gives, and what follows from it.

    `max_length`: of prompts, as the benchmark's authors set it; `chat`: how they are wrapped. `speedup`: of
    the first token, the mean that the paper reports for its method over the six categories; it gives neither
    layers nor keeps. `paper_model`: what it calls the model.
    """

    name: str
    known_by: re.Pattern[str]
    max_length: int
    speedup: float
    chat: Chat = "auto"
    paper_model: str | None = None


PRESETS = {
    one.name: one
    for one in (
        Preset(
            "llama-2-7b-chat", re.compile(r"llama[-_ ]?2[-_ ]7b[-_ ]chat"), 3500, 2.0, "llama-2", "Llama 2 7B"
        ),
        Preset("xgen-7b-8k-inst", re.compile(r"xgen[-_ ]7b[-_ ]8k[-_ ]inst"), 7500, 3.0, "xgen", "XGen 7B"),
        Preset("smollm2-135m-instruct", re.compile(r"smollm2[-_ ]135m[-_ ]instruct"), 3500, 2.0),
    )
}
OTHER = Preset("of any other model", re.compile(""), 3500, 2.0)


def preset_of(llm: LLM, name: str | None) -> Preset:
    """The one of that name, or by the name of the checkpoint."""
    if name is None:
        known = model_name(llm.checkpoint.folder).lower()
        return next((one for one in PRESETS.values() if one.known_by.search(known)), OTHER)
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
