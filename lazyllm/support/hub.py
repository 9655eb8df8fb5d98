"""Downloads from the Hugging Face hub, which needs the optional package huggingface_hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazyllm.support.optional import package


def fetch(what: str, download: Callable[[Any], str]) -> Path:
    """The path that `download` returns for the module huggingface_hub; `what` names it in errors."""
    huggingface_hub = package("huggingface_hub", what)
    try:
        return Path(download(huggingface_hub))
    except Exception as error:  # the hub's errors have no common base
        raise OSError(f"{what} could not be fetched: {error}") from error
