"""Downloads from the Hugging Face hub, which needs the optional package huggingface_hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def fetch(what: str, download: Callable[[Any], str]) -> Path:
    """The path that `download` returns for the module huggingface_hub; `what` names it in errors."""
    try:
        import huggingface_hub
    except ImportError:
        raise ImportError(f"{what} needs the package huggingface_hub: pip install huggingface_hub") from None
    try:
        return Path(download(huggingface_hub))
    except Exception as error:  # the hub's errors have no common base
        raise OSError(f"{what} could not be fetched: {error}") from error
