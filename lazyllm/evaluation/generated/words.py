"""What the generated tasks are written with: the files in texts/, each read at first use."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def file_text(name: str) -> str:
    """The text of NAME.txt without its last line break."""
    file = files(__package__) / "texts" / f"{name}.txt"
    return file.read_text(encoding="utf-8").removesuffix("\n")


@cache
def vocabulary(kind: str) -> tuple[str, ...]:
    """Common English words, each an "adjective" or a "noun"; no word is part of another one."""
    return tuple(file_text(kind).split())
