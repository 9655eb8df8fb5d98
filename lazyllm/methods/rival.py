"""Rival: a method that Pruning is compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lazyllm.method import Method
from lazyllm.pruning import DENSE
from lazyllm.support.json_text import parse_json

if TYPE_CHECKING:
    from lazyllm.checkpoints.config import ModelConfig


class Rival(Method):
    """Base of the dataclasses in this package: JSON with the method's `name`; the engine runs dense."""

    name: ClassVar[str]

    def to_json(self) -> str:
        return json.dumps({"method": self.name, **self._plain()})

    def _plain(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, text: str) -> Self:
        value = parse_json(text, cls.name, strict=True)
        if not isinstance(value, dict):
            raise TypeError(f"{cls.name} must be a JSON object, not {text.strip()}")
        return cls.from_fields(value)

    @classmethod
    def from_fields(cls, fields_given: Mapping[str, Any]) -> Self:
        values = dict(fields_given)
        if (named := values.pop("method", cls.name)) != cls.name:
            raise ValueError(f"method is {named!r}; it must be {cls.name!r}")
        required = {field.name: field.default is MISSING for field in fields(cls)}  # type: ignore[arg-type]
        for name in values:
            if name not in required:
                raise ValueError(f"{cls.name} has no field {name!r}; its fields are {', '.join(required)}")
        for name, needed in required.items():
            if needed and name not in values:
                raise ValueError(f"{cls.name} needs {name}")
        return cls(**values)

    def check(self, config: ModelConfig) -> None:
        """Accepts every model; a subclass that cannot run some models raises an error here."""

    def core(self) -> dict[str, Any]:
        return DENSE.core()
