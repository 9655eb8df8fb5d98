"""Optional packages, imported where they are used, and downloads by one of them."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def package(module: str, what: object, extra: str | None = None) -> Any:
    """The module; an error says that `what` needs it, and how to install it or the extra that has it."""
    try:
        return import_module(module)
    except ImportError:
        install = f"'lazyllm-engine[{extra}]'" if extra else module
        raise ImportError(f"{what} needs the package {module}: pip install {install}") from None


def fetch(what: str, download: Callable[[Any], str]) -> Path:
    """The path of `what`, which `download` gets from the Hugging Face hub by the module huggingface_hub."""
    huggingface_hub = package("huggingface_hub", what)
    try:
        return Path(download(huggingface_hub))
    except Exception as error:  # the hub's errors have no common base
        raise OSError(f"{what} could not be fetched: {error}") from error
