"""Method: the base class of every setting that can be given as `pruning=`."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from typing import Any, ClassVar, Self

import numpy as np

from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.support.json_text import json_digest

LABEL_WIDTH = 80
Spans = tuple[tuple[int, int], ...]
MANY = 2**20  # tokens; of so long a prompt, every method that shortens prompts removes some


class Method:
    """A way to shorten a prompt before the model reads it, and to prune while the engine runs.

    As it stands it does neither: the model reads the whole prompt densely. A subclass overrides what it
    changes, and is a frozen dataclass whose fields are the setting: it prints them, and is compared by them.
    `turn` counts the prompts of a conversation from 0.
    """

    name: ClassVar[str] = ""
    """The method's name in texts such as `random:keep=0.5`, and in JSON."""
    compresses = False
    """True where `compress` may shorten a text; such a method takes no token ids."""

    def _set(self, **values: Any) -> None:
        """Sets fields of a frozen dataclass, in its `__init__` or `__post_init__`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def full_label(self) -> str:
        """The setting in words, however long."""
        return str(self)

    @property
    def label(self) -> str:
        """The setting's name in tables and pictures, where it is not given one."""
        return shortened(self.full_label)

    def to_json(self) -> str:
        """All fields as one JSON object; `parse_method` gives an equal setting back."""
        return json.dumps({"method": self.name, **self._plain()})

    def _plain(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_fields(cls, value: Any) -> Self:
        """The setting with these arguments of the class; an entry `method`, if any, must be the class's name."""
        if not isinstance(value, Mapping):
            raise TypeError(f"{cls.name} must be a JSON object, not {value!r}")
        values = dict(value)
        if (named := values.pop("method", cls.name)) != cls.name:
            raise ValueError(f"method is {named!r}; it must be {cls.name!r}")
        signature = inspect.signature(cls)
        try:
            signature.bind_partial(**values)  # to report a wrong name before a missing one
            signature.bind(**values)
        except TypeError as error:
            raise ValueError(f"{cls.name}: {error}; it takes {', '.join(signature.parameters)}") from None
        return cls(**values)

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError if this model cannot be run with this setting."""

    def mismatch(self, checkpoint: Checkpoint, progress: bool) -> str | None:
        """The warning when a session opens on a checkpoint that the setting was not made for."""
        return None

    def conditions(self, llm: Any, progress: bool) -> dict[str, Any]:
        """Conditions of results beside the setting's text: the hash of the source of a class outside this package."""
        digest = source_digest(type(self))
        return {"source sha256": digest} if digest else {}

    def for_prompt(self, config: ModelConfig, n_prompt: int) -> Method:
        """The setting for a first prompt of `n_prompt` tokens: this one, unless it depends on the length."""
        return self

    def protecting(self, spans: Spans) -> Method:
        """The same setting that never drops the prompt's positions in these spans (first, end)."""
        raise ValueError(f"{self.label} cannot protect parts of a prompt")

    def compress(self, llm: Any, text: str) -> str:
        """The shortened text that the model reads in place of `text`; `llm` is the model that answers."""
        return text

    def without_compression(self) -> Self:
        """The same method for a prompt that `compress` has shortened already."""
        other = copy(self)
        other._set(compresses=False)
        return other

    def kept(self, n_prompt: int) -> int:
        """The number of tokens of a prompt that reach the model."""
        return n_prompt

    def ids(self, llm: Any, prompt_ids: list[int], turn: int) -> list[int]:
        """The prompt's token ids that the model reads, at consecutive positions; `llm` is the model."""
        return prompt_ids

    @property
    def reads_in_parts(self) -> bool:
        """True if the model may read a prompt's beginning before the rest of it is there."""
        first_stages = ((self.core() or {}).get("stages") or [])[:1]
        for_good = any(stage[2:] for stage in first_stages)
        return not (self.compresses or for_good or self.kept(MANY) < MANY)

    @property
    def asking_rows(self) -> int:
        """How many of a prompt's last tokens may score the others, and so have to be in its last pass."""
        return int((self.core() or {}).get("queries", 1))

    def core(self) -> dict[str, Any] | None:
        """The fields that the C core takes, those of a `Pruning` or a `Policy`; None is dense."""
        return None

    def prefill_flops(self, config: ModelConfig, n_prompt: int, last_pass: np.ndarray) -> int | None:
        """Counted operations of a prefill with these counts, `Session.last_pass`; None if unknown."""
        return None

    def why_unpruned(self, n_prompt: int, n_context: int) -> str:
        """Why no token was dropped of a context of `n_context` tokens, `n_prompt` of them prompt tokens."""
        return f"{self.name or type(self).__name__} found no token to drop"


def shortened(text: str) -> str:
    """The text; if it is too long for a label, its beginning and a digest that tells it apart."""
    return text if len(text) <= LABEL_WIDTH else f"{text[: LABEL_WIDTH - 7]}…{json_digest(text)[:6]}"


def source_digest(cls: type[Any]) -> str | None:
    """The hash of the source of a class and its bases outside this package; None where there is no source."""
    skipped = (__name__.partition(".")[0], "builtins", "abc")
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in skipped]
    try:
        sources = "".join(inspect.getsource(base) for base in bases)
    except (OSError, TypeError):
        return None
    return hashlib.sha256(sources.encode()).hexdigest() if bases else None
