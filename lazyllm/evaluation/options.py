"""Options of `longbench.run`, `sweep` and `reproduce`, as keyword arguments and as frozen objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict

from lazyllm.evaluation.chats import CHATS, Chat
from lazyllm.support import checked

MAX_LENGTH = 3500  # prompt tokens before the chat wrapper, for models with a context of 4096
WARM_UPS = 5
EDIT_SIM = "difflib"


class RunKeywords(TypedDict, total=False):
    """Keyword arguments of every run."""

    chat: Chat | None
    warm_ups: int
    retry_failed: bool
    progress: bool


class DataKeywords(RunKeywords, total=False):
    """Keyword arguments of `longbench.run`, `sweep` and `reproduce`; `longbench.run` describes them."""

    data: str | Path | None
    datasets: Sequence[str] | None
    limit: int | None
    sample: int | None
    min_item_length: int | None
    max_item_length: int | None
    max_length: int | None
    max_new_tokens: int | None
    prompts: str | Path | None
    edit_sim: str


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The checked values of RunKeywords, with defaults."""

    chat: Chat = "auto"
    warm_ups: int = WARM_UPS
    retry_failed: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        checked.whole(self.warm_ups, "warm_ups", 0)
        if self.chat not in CHATS:
            raise ValueError(f"chat must be one of {', '.join(CHATS)}, not {self.chat!r}")

    @classmethod
    def of(cls, keywords: Mapping[str, Any], **defaults: Any) -> Self:
        """The options given as keyword arguments; None is the default."""
        given = {name: value for name, value in keywords.items() if value is not None}
        return cls(**{**defaults, **given})


@dataclass(frozen=True, kw_only=True)
class DataOptions(RunOptions):
    """The checked values of DataKeywords, with defaults."""

    data: str | Path | None = None
    datasets: Sequence[str] | None = None
    limit: int | None = None
    sample: int | None = None
    min_item_length: int | None = None
    max_item_length: int | None = None
    max_length: int = MAX_LENGTH
    max_new_tokens: int | None = None
    prompts: str | Path | None = None
    edit_sim: str = EDIT_SIM

    def __post_init__(self) -> None:
        super().__post_init__()
        checked.whole(self.max_length, "max_length", 2)
        if self.max_new_tokens is not None:
            checked.whole(self.max_new_tokens, "max_new_tokens", 1)
