"""The conditions of a run: everything its results depend on, stored in its manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import lazyllm
from lazyllm.checkpoints.digest import digest, weights_digest
from lazyllm.llm import DTYPES, LLM
from lazyllm.machine.info import processor, version
from lazyllm.method import Method

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
"""Packages, if installed, on which samples, tokens and scores depend."""


def items_digest(items: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """SHA-256 of all items, in order."""
    hasher = hashlib.sha256()
    for name, rows in items.items():
        for row in rows:
            hasher.update(json.dumps([name, row], sort_keys=True).encode())
    return hasher.hexdigest()


def conditions(
    llm: LLM,
    settings: Mapping[str, Method],
    items: Mapping[str, Sequence[Mapping[str, Any]]],
    rest: Mapping[str, Any],
    progress: bool,
) -> dict[str, Any]:
    """The manifest; `rest` holds the conditions of the tasks: limits, prompts, metrics."""
    folder = llm.checkpoint.folder
    tokenizer = [path for name in TOKENIZER_PARTS if (path := folder / name).exists()]
    return {
        "format": FORMAT,
        "lazyllm": lazyllm.__version__,
        "model": llm.config.name or folder.name,
        "model sha256": weights_digest(llm.checkpoint, progress),
        "tokenizer sha256": digest(tokenizer, progress=False),
        "dtype": sorted({DTYPES.get(tensor[1], tensor[1]) for tensor in llm.checkpoint.tensors}),
        "device": llm.device,
        "kernels": llm.core.isa,
        "threads": llm.threads,
        "machine": processor(),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "settings": list(settings),
        **{
            f"{label}: {what}": told
            for label, method in settings.items()
            for what, told in method.conditions(llm, progress).items()
        },
        "items": {name: len(rows) for name, rows in items.items()},
        "items sha256": items_digest(items),
        **rest,
    }
