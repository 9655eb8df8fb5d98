"""Optional packages, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def package(module: str, what: object, extra: str | None = None) -> Any:
    """The module; an error says that `what` needs it, and how to install it or the extra that has it."""
    try:
        return import_module(module)
    except ImportError:
        install = f"'lazyllm-engine[{extra}]'" if extra else module
        raise ImportError(f"{what} needs the package {module}: pip install {install}") from None
