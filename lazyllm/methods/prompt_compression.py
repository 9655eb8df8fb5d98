"""PromptCompression: removes the parts of a prompt that a language model predicts easily."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lazyllm.checkpoints.digest import weights_digest
from lazyllm.method import Method
from lazyllm.methods.compression import UNITS, compressed
from lazyllm.support import checked


@dataclass(frozen=True)
class PromptCompression(Method):
    """Selective Context (Li et al. 2023): removes from a text what a language model predicts easily.

    Units are sentences, tokens or noun phrases (`unit="phrase"`, which needs spaCy). A unit's score is the
    mean self-information of its tokens; units below the `100 * ratio` percentile are removed. `model` is the
    language model: an LLM, a folder or hub id, or None for the model that answers. With `by_sentence`
    sentences are found and scored as in the authors' code, each by itself behind BOS; else in one pass over
    the text.
    """

    name: ClassVar[str] = "compress"
    compresses = True
    ratio: float
    unit: str = "sentence"
    model: Any = None
    by_sentence: bool = False

    def __post_init__(self) -> None:
        self._set(ratio=checked.share(self.ratio, "ratio"))
        checked.choice(self.unit, "unit", UNITS)
        checked.truth(self.by_sentence, "by_sentence")
        if not (self.model is None or isinstance(self.model, str) or hasattr(self.model, "session")):
            raise TypeError(f"model must be an LLM, a folder or hub id, or None, not {self.model!r}")

    def _plain(self) -> dict[str, Any]:
        model = self.model if isinstance(self.model, str | None) else str(self.model.checkpoint.path)
        return {**super()._plain(), "model": model}

    def conditions(self, llm: Any, progress: bool) -> dict[str, Any]:
        if self.model is None:
            return {}
        return {"sha256 of the model that compresses": weights_digest(self.reader(llm).checkpoint, progress)}

    def compress(self, llm: Any, text: str) -> str:
        """The text without the units that are removed; `model`, or else `llm`, scores them."""
        if not isinstance(text, str):
            raise TypeError(f"PromptCompression works on text, not on {type(text).__name__}")
        return compressed(text, self.reader(llm), self.ratio, self.unit, self.by_sentence)

    def reader(self, llm: Any) -> Any:
        """The language model that scores the units: `model`, or else `llm`, the model that answers."""
        if isinstance(self.model, str):
            return llm.sibling(self.model)
        return llm if self.model is None else self.model
