"""The conditions of a run: all that its results depend on, as its manifest holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lazyllm
from lazyllm.environment import processor
from lazyllm.llm import DTYPES, LLM
from lazyllm.progress import bar

FORMAT = 1
TOKENIZER_PARTS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")
BLOCK = 1 << 22


_known: dict[tuple[tuple[Path, int, int], ...], str] = {}


def digest(paths: Iterable[Path], progress: bool) -> str:
    """SHA-256 of the files, one after the other; found once a process while size and time stay the same."""
    files = list(paths)
    stats = [path.stat() for path in files]
    state = tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in zip(files, stats, strict=True))
    if state not in _known:
        _known[state] = read_digest(files, sum(stat.st_size for stat in stats), progress)
    return _known[state]


def read_digest(files: Sequence[Path], n_bytes: int, progress: bool) -> str:
    hasher = hashlib.sha256()
    with bar(n_bytes >> 20, "hashing the model", "MiB", progress) as line:
        for path in files:
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    hasher.update(block)
                    line.update(len(block) / (1 << 20))
    return hasher.hexdigest()


def items_digest(items: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Of the questions that are asked, in order."""
    hasher = hashlib.sha256()
    for name, rows in items.items():
        for row in rows:
            hasher.update(repr((name, row["_id"], row["input"], row["context"], row["answers"])).encode())
    return hasher.hexdigest()


def conditions(
    llm: LLM,
    settings: Sequence[str],
    items: Mapping[str, Sequence[Mapping[str, Any]]],
    asked: Mapping[str, Any],
    progress: bool,
) -> dict[str, Any]:
    """`asked` is the rest: limits, prompts, metrics."""
    folder = llm.checkpoint.folder
    weights = [folder / "config.json", *map(Path, llm.checkpoint.shards)]
    tokenizer = [path for name in TOKENIZER_PARTS if (path := folder / name).exists()]
    return {
        "format": FORMAT,
        "lazyllm": lazyllm.__version__,
        "model": llm.config.name or folder.name,
        "model sha256": digest(weights, progress),
        "tokenizer sha256": digest(tokenizer, progress=False),
        "dtype": sorted({DTYPES.get(tensor[1], tensor[1]) for tensor in llm.checkpoint.tensors}),
        "device": llm.device,
        "kernels": llm.core.isa,
        "threads": llm.threads,
        "machine": processor(),
        "settings": list(settings),
        "items": {name: len(rows) for name, rows in items.items()},
        "items sha256": items_digest(items),
        **asked,
    }
