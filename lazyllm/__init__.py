"""LazyLLM: dynamic token pruning for language models of some twenty families, on a C core.

The public names are those of __init__.pyi; each is imported when it is first used.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
_STUB = Path(__file__).with_suffix(".pyi").read_text()
_HOMES = {name: module for module, name in re.findall(r"from (lazyllm\.\S+) import (\w+)", _STUB)}
_MODULES = ("longbench", "reproduce")
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"lazyllm.{name}")
    if name == "_core":
        try:
            return import_module("lazyllm._core")
        except ImportError as error:
            folder = Path(__file__).parent
            advice = "run Python elsewhere, or build it here: pip install -e ."
            raise ImportError(f"{folder} is source without its compiled core ({error}); {advice}") from None
    if name not in _HOMES:
        raise AttributeError(f"module 'lazyllm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
