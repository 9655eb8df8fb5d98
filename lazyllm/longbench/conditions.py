"""The conditions of a run: all that its results depend on, as its manifest holds them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lazyllm
from lazyllm.environment import processor, version
from lazyllm.llm import DTYPES, LLM
from lazyllm.methods import Method, PromptCompression
from lazyllm.progress import bar

FORMAT = 1
TOKENIZER_PARTS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",  # names end tokens
)
PACKAGES = ("numpy", "tokenizers", "rouge", "jieba", "rapidfuzz", "spacy")
"""What draws, splits and scores depend on, where it is installed."""
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
    """Of all that is asked, in order."""
    hasher = hashlib.sha256()
    for name, rows in items.items():
        for row in rows:
            hasher.update(json.dumps([name, row], sort_keys=True).encode())
    return hasher.hexdigest()


def weights_digest(llm: LLM, progress: bool) -> str:
    return digest([llm.checkpoint.folder / "config.json", *map(Path, llm.checkpoint.shards)], progress)


def conditions(
    llm: LLM,
    settings: Mapping[str, Method],
    items: Mapping[str, Sequence[Mapping[str, Any]]],
    asked: Mapping[str, Any],
    progress: bool,
) -> dict[str, Any]:
    """`asked` is the rest: limits, prompts, metrics."""
    folder = llm.checkpoint.folder
    tokenizer = [path for name in TOKENIZER_PARTS if (path := folder / name).exists()]
    return {
        "format": FORMAT,
        "lazyllm": lazyllm.__version__,
        "model": llm.config.name or folder.name,
        "model sha256": weights_digest(llm, progress),
        "tokenizer sha256": digest(tokenizer, progress=False),
        "dtype": sorted({DTYPES.get(tensor[1], tensor[1]) for tensor in llm.checkpoint.tensors}),
        "device": llm.device,
        "kernels": llm.core.isa,
        "threads": llm.threads,
        "machine": processor(),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "settings": list(settings),
        **{
            f"sha256 of the model that compresses in {label}": weights_digest(method.reader(llm), progress)
            for label, method in settings.items()
            if isinstance(method, PromptCompression) and method.model is not None
        },
        "items": {name: len(rows) for name, rows in items.items()},
        "items sha256": items_digest(items),
        **asked,
    }
