"""Method: the base class of every setting that can be given as `pruning=`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lazyllm.checkpoints.checkpoint import Checkpoint
    from lazyllm.checkpoints.config import ModelConfig


class Method(ABC):
    """How a prompt is shortened before the model reads it, and how the engine prunes while it runs.

    The default methods do not shorten the prompt. `turn` counts the prompts of a conversation from 0.
    """

    compresses = False
    """True where `compress` may shorten a text; such a method takes no token ids."""

    @abstractmethod
    def core(self) -> dict[str, Any]:
        """The fields that the C core takes."""

    @abstractmethod
    def to_json(self) -> str:
        """All fields as one JSON object; `from_json` gives an equal setting back."""

    @abstractmethod
    def check(self, config: ModelConfig) -> None:
        """Raises ValueError if this model cannot be run with this setting."""

    def resolved(self, least: Callable[[Any], int]) -> Method:
        """The setting with a number, `least(pruning)`, in place of a `min_tokens` of "auto"."""
        return self

    def mismatch(self, checkpoint: Checkpoint) -> str | None:
        """The warning when a session opens on a checkpoint that the setting was not made for."""
        return None

    def compress(self, llm: Any, text: str) -> str:
        """The shortened text that the model reads in place of `text`; `llm` is the model that answers."""
        return text

    def kept(self, n_prompt: int) -> int:
        """The number of tokens of a prompt that reach the model."""
        return n_prompt

    def check_length(self, config: ModelConfig, n_prompt: int) -> None:  # noqa: B027  # most take any length
        """Raises ValueError if a prompt is too long to be shortened; what remains of it is checked later."""

    def ids(self, llm: Any, prompt_ids: list[int], turn: int) -> list[int]:
        """The prompt's token ids that the model reads, at consecutive positions; `llm` is the model."""
        return prompt_ids

    def gaps(self, n_prompt: int, turn: int) -> np.ndarray:
        """Ascending indices of the prompt tokens that the model skips; their positions stay empty."""
        return np.empty(0, np.int64)

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int | None:
        """Counted operations of a prefill that has run; None if some of the work cannot be counted.

        `last_pass` (layers, 3) is `Session.last_pass` after that prefill.
        """
        return None
