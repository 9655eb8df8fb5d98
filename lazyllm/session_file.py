"""SessionFile: a session on disk, one safetensors file that ends with a digest of everything before it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open

from lazyllm import __version__, _core
from lazyllm.checkpoints.checkpoint import header_bytes, read_shard
from lazyllm.method import Method, source_digest
from lazyllm.methods.parsing import parse_method
from lazyllm.prompt import Place, checked_messages
from lazyllm.support.files import whole_file
from lazyllm.support.json_text import parse_object

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.session import Session

FORMAT = "lazyllm session 8"
DIGEST, DIGEST_BYTES = "sha256", 32
BLOCK = 1 << 24  # bytes
TOKENS = ("ids", "kinds", "depths", "gone")
WIDTHS = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1}


def identity(model: LLM, method: Method, progress: bool) -> dict[str, str]:
    """Properties that a saved session must share with the model and the setting that it is restored for."""
    return {
        "model sha256": model.checkpoint.weights_digest(progress),
        "compute": model.compute,
        "weights": model.weights,
        "activations": model.core.activations,
        "kv": model.core.kv,
        "pruning": method.to_json(),
        "source sha256": source_digest(type(method)) or "",
    }


def write(session: Session, path: Path, progress: bool) -> None:
    """Writes a session whole or not at all; `progress` shows a bar while the model is hashed."""
    description = {
        "lazyllm": __version__,
        "model": session.llm.config.name,
        "drawn": session.core.drawn,
        "document": session.document,
        "prompts": [asdict(place) for place in session.prompts],
        "schedule": session.pruning.to_json(),
        **identity(session.llm, session.setting, progress),
    }
    metadata = {"format": FORMAT, "session": json.dumps(description)}
    entries = dict(layout(session.core, session.llm))
    sizes = {name: (*kind, math.prod(kind[1]) * WIDTHS[kind[0]]) for name, kind in entries.items()}
    header = header_bytes(sizes | {DIGEST: ("U8", (DIGEST_BYTES,), DIGEST_BYTES)}, metadata)
    hasher = hashlib.sha256(header)
    with whole_file(path) as file:
        file.write(header)
        for name in entries:
            part, _, layer = name.partition(".")
            array: Any = session.core.state(part, int(layer)) if layer else getattr(session.core, name)
            hasher.update(array.data.cast("B"))
            file.write(array.data.cast("B"))
        file.write(hasher.digest())


def layout(core: _core.Session, model: LLM) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Name, dtype and shape of each tensor of a session."""
    length, config = core.length, model.config
    yield from ((name, ("I32", (length,))) for name in ("ids", "depths"))
    for part in ("logits", "remembered", "keys", "values", "aux"):
        for layer in range(1 if part == "logits" else config.n_layers):
            n = core.state_length(part, layer)
            kind: tuple[str, tuple[int, ...]] = "F32", (n,)
            if part == "aux":
                kind = model.core.activations, (n, config.hidden)
            elif part in ("keys", "values"):
                kind = model.core.kv, (config.n_kv_heads, n, config.head_dim)
            if n:
                yield f"{part}.{layer}", kind
    yield from ((name, ("U8", (length,))) for name in ("kinds", "gone"))


class SessionFile:
    """A file that `write` has made; ValueError for any other, and for a damaged one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._tensors = {tensor[0]: tensor for tensor in read_shard(path, 0) if tensor[0] != DIGEST}
            with safe_open(path, framework="np") as opened:
                metadata = opened.metadata() or {}
        except ValueError as error:
            raise ValueError(f"{path} is no session of lazyllm, or is damaged or cut short") from error
        if (kind := metadata.get("format")) != FORMAT:
            raise ValueError(f"{path} is no session of lazyllm: its format is {kind}, not {FORMAT}")
        self._data = np.memmap(path, np.uint8, mode="r")
        end, hasher = len(self._data) - DIGEST_BYTES, hashlib.sha256()
        for begin in range(0, end, BLOCK):
            hasher.update(self._data[begin : min(begin + BLOCK, end)].data)
        with self._refusing():
            if hasher.digest() != self._data[end:].tobytes():
                raise ValueError("its contents do not have the digest at its end")
            self.saved = parse_object(metadata["session"], "its description")

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raises ValueError, which names the file, for errors in its contents, which a stranger may have written."""
        try:
            yield
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path} is damaged: {error}") from error

    def method_for(self, model: LLM, pruning: Method | None, progress: bool) -> Method:
        """The setting; ValueError if the session is of another one than `pruning`, or of another model."""
        text = str(self.saved.get("pruning"))
        try:
            method = parse_method(text) if pruning is None else pruning
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path} is of {text}; give it as pruning=: {error}") from None
        for name, value in identity(model, method, progress).items():
            if (saved := self.saved.get(name)) != value:
                raise ValueError(f"{self.path} is a session with {name} {saved}; here it is {value}")
        return method

    def fill(self, session: Session) -> None:
        """Restores the saved state in an empty session of the same model and setting."""
        core, saved = session.core, self.saved
        with self._refusing():
            ids, kinds, depths, gone = map(self._tensor, TOKENS)
        session.reserve(len(kinds))
        with self._refusing():
            if saved["schedule"] != saved["pruning"]:
                session.pruning = parse_method(saved["schedule"])
                core.reschedule(session.pruning.core())
            core.set_tokens(ids, kinds, depths, gone)
            for name in self._tensors:
                if name not in TOKENS:
                    part, _, layer = name.partition(".")
                    core.set_state(part, int(layer), self._tensor(name))
            if saved["drawn"] is not None:
                core.drawn = saved["drawn"]
            if document := saved["document"]:
                session.document = {"text": str(document["text"]), "chat": bool(document["chat"])}
            session.places = checked_places(saved["prompts"], core.kinds, session.setting)
            tensors = {name: (dtype, shape) for name, dtype, shape, *_ in self._tensors.values()}
            if tensors != dict(layout(core, session.llm)):
                raise ValueError("its tensors are not those of its tokens")

    def _tensor(self, name: str) -> np.ndarray:
        """A copy of a tensor's bytes, which begin at a multiple of any width."""
        if name not in self._tensors:
            raise ValueError(f"tensor {name!r} is missing")
        *_, begin, n_bytes = self._tensors[name]
        return self._data[begin : begin + n_bytes].copy()


def checked_places(saved: list[Any], kinds: np.ndarray, method: Method) -> tuple[Place, ...]:
    """The places of prompts, which must be where the context has prompt tokens."""
    places = tuple(Place(**place) for place in saved)
    for place in places:
        checked_messages(place.messages)
        if place.n_run < 1 or place.n_given < (1 if method.compresses else place.n_run):
            raise ValueError(f"a prompt has {place.n_run} tokens in the context of {place.n_given} given")
    tokens = np.flatnonzero(kinds != 1).tolist()
    spans = (range(place.begins, place.begins + place.n_run) for place in places)
    if sum(place.n_run for place in places) != len(tokens) or [*chain(*spans)] != tokens:
        raise ValueError("its prompts are not where its prompt tokens are")
    return places
