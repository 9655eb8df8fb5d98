"""What the paper compares and reports: Fu et al. 2024, arXiv 2407.14057, version 1."""

from __future__ import annotations

import re
from collections.abc import Mapping
from csv import DictReader
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from lazyllm.checkpoints.config import model_name
from lazyllm.evaluation.chats import Chat

if TYPE_CHECKING:
    from lazyllm.llm import LLM

Published = Mapping[tuple[str, str], Mapping[str, str]]
"""By category and method: the cells of Table 1, and of Table 2 for LazyLLM; empty for other models."""
FIRST_TOKEN = ("3376", "68", "21", "23 %")
"""Figure 1, of Llama 2 7B: prompt tokens, new tokens, the first token's time in steps, its share."""


@dataclass(frozen=True)
class PaperSetup:
    """`max_length` in prompt tokens and `chat`, the wrapper, are those of LongBench's authors.

    `speedup` of the first token is the paper's mean for LazyLLM over the six categories; the paper gives
    neither layers nor keeps. `paper_model`: the paper's name of the model. That its Llama 2 is the chat model
    is our reading: its baseline is near LongBench's own figures for Llama2-7B-chat-4k.
    """

    name: str
    max_length: int
    speedup: float
    chat: Chat = "auto"
    paper_model: str | None = None

    def is_of(self, llm: LLM) -> bool:
        """Whether the checkpoint has this name, however it is spelled."""
        return plain(self.name) in plain(model_name(llm.checkpoint.path))

    @property
    def published(self) -> Published:
        with (files("lazyllm.reproduce") / "published.csv").open(encoding="utf-8") as file:
            rows = [row for row in DictReader(file) if row["model"] == self.paper_model]
        return {(row["category"], row["method"]): row for row in rows}


def plain(name: str) -> str:
    """Without separators: llama2_7B-chat is llama-2-7b-chat."""
    return re.sub("[-_ ]", "", name.lower())


OTHER = PaperSetup("for other models", 3500, 2.0)
SETUPS = {
    setup.name: setup
    for setup in (
        PaperSetup("llama-2-7b-chat", 3500, 2.0, "llama-2", "Llama 2 7B"),
        PaperSetup("xgen-7b-8k-inst", 7500, 3.0, "xgen", "XGen 7B"),
        PaperSetup("smollm2-135m-instruct", 3500, 2.0),
    )
}


def setup_of(llm: LLM, name: str | None) -> PaperSetup:
    """The setup of that name; None selects by the checkpoint's name."""
    if name is None:
        return next((setup for setup in SETUPS.values() if setup.is_of(llm)), OTHER)
    if name not in SETUPS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(SETUPS)}")
    return SETUPS[name]
