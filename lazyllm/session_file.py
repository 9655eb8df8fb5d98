"""SessionFile: a session on disk, one safetensors file that ends with a digest of everything before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import header_bytes, read_shard
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.digest import weights_digest
from lazyllm.method import Method, source_digest
from lazyllm.methods import parse_method
from lazyllm.model import Model
from lazyllm.prompt import PromptPlace, Turn
from lazyllm.support.files import whole_file
from lazyllm.support.json_text import parse_object
from lazyllm.support.progress import bar

FORMAT, VERSION = "lazyllm session", "2"
DIGEST = "sha256"
HEADER_LIMIT = 100_000_000  # bytes
TOKENS = {"ids": "I32", "depths": "I32", "kinds": "U8", "gone": "U8"}
WIDTHS = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1}
KINDS = {"drawn": int | None, "prompts": list, "turns": list}
"""The types of a description's values; all others are text."""
BLOCK = 1 << 24  # bytes
MIB = 20  # the shift from bytes to MiB
LARGE = 256  # MiB that take long enough for a bar


IDENTITY = {
    "sha256": "a model of SHA-256",
    "compute": "compute",
    "weights": "weights",
    "activations": "hidden states in",
    "kv": "keys and values in",
    "pruning": "the pruning",
    "source": "a pruning whose source has the SHA-256",
}
"""Properties that a saved session must share with the model and the setting that it is restored for."""


def identity(model: Model, method: Method, progress: bool) -> dict[str, str]:
    return {
        "sha256": weights_digest(model.checkpoint, progress),
        "compute": model.compute,
        "weights": model.weights,
        "activations": model.core.activations,
        "kv": model.core.kv,
        "pruning": method.to_json(),
        "source": source_digest(type(method)) or "",
    }


@dataclass(frozen=True)
class Description:
    """The header of a session's file. `model` names the checkpoint, `sha256` is of its config and weights;
    `pruning` is the setting as JSON, `source` the hash of its class where that is the user's."""

    lazyllm: str
    model: str
    sha256: str
    compute: str
    weights: str
    activations: str
    kv: str
    pruning: str
    source: str
    drawn: int | None
    prompts: list[list[int]]
    turns: list[dict[str, Any]]


def write(
    path: Path, core: _core.Session, config: ModelConfig, description: Description, progress: bool
) -> None:
    """Writes a session whole or not at all."""
    entries = dict(layout(core, config, description))
    total = sum(n_bytes for *_, n_bytes in entries.values())
    metadata = {"format": FORMAT, "version": VERSION, "session": json.dumps(asdict(description))}
    sizes = {**entries, DIGEST: ("U8", (hashlib.sha256().digest_size,), hashlib.sha256().digest_size)}
    hasher = hashlib.sha256()
    with whole_file(path) as file, bar_of("saving the session", total, progress) as line:
        header = header_bytes(sizes, metadata)
        hasher.update(header)
        file.write(header)
        for name in entries:
            data = tensor_of(core, name).data.cast("B")
            hasher.update(data)
            file.write(data)
            line.update(len(data) >> MIB)
        file.write(hasher.digest())


def bar_of(what: str, n_bytes: int, progress: bool) -> Any:
    return bar(n_bytes >> MIB, what, "MiB", progress and n_bytes >> MIB >= LARGE, leave=False)


def layout(
    core: _core.Session, config: ModelConfig, described: Description
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], int]]]:
    """Name, dtype, shape and bytes of each tensor of a session; wide types come first."""

    def entry(name: str, dtype: str, *shape: int) -> tuple[str, tuple[str, tuple[int, ...], int]]:
        return name, (dtype, shape, int(np.prod(shape)) * WIDTHS[dtype])

    length = core.length
    yield entry("ids", "I32", length)
    yield entry("depths", "I32", length)
    if n := core.state_length("logits", 0):
        yield entry("logits.0", "F32", n)
    for layer in range(config.n_layers):
        if n := core.state_length("remembered", layer):
            yield entry(f"remembered.{layer}", "F32", n)
    for layer in range(config.n_layers):
        for part in ("keys", "values"):
            if n := core.state_length(part, layer):
                yield entry(f"{part}.{layer}", described.kv, config.n_kv_heads, n, config.head_dim)
        if n := core.state_length("aux", layer):
            yield entry(f"aux.{layer}", described.activations, n, config.hidden)
    yield entry("kinds", "U8", length)
    yield entry("gone", "U8", length)


def tensor_of(core: _core.Session, name: str) -> np.ndarray:
    if name in TOKENS:
        return np.asarray(getattr(core, name))
    part, _, layer = name.partition(".")
    array = core.state(part, int(layer))
    assert array is not None
    return array


class SessionFile:
    """A file that `write` has made, mapped; ValueError for any other, and for a damaged one."""

    def __init__(self, path: Path, progress: bool) -> None:
        self.path = path
        size = path.stat().st_size
        n_digest = hashlib.sha256().digest_size
        if size < 8 + n_digest:
            raise ValueError(f"{path} has {size} bytes and is no session of lazyllm")
        self._data = np.memmap(path, np.uint8, mode="r")
        self.description = self._described()
        hasher = hashlib.sha256()
        with bar_of("checking the session", size, progress) as line:
            for begin in range(0, size - n_digest, BLOCK):
                block = self._data[begin : min(begin + BLOCK, size - n_digest)]
                hasher.update(block.data)
                line.update(len(block) >> MIB)
        if hasher.digest() != self._data[size - n_digest :].tobytes():
            raise ValueError(
                f"{path} is damaged or cut short: its contents do not have the digest at its end"
            )
        self._places = {tensor[0]: tensor for tensor in read_shard(path, 0) if tensor[0] != DIGEST}
        for name, dtype, _, _, begin, _ in self._places.values():
            if dtype not in WIDTHS or begin % WIDTHS[dtype]:
                self.damaged(f"tensor {name!r} is of type {dtype} and begins at byte {begin}")
        if missing := sorted(TOKENS.keys() - self._places):
            self.damaged(f"tensor {missing[0]!r} is missing")

    def damaged(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.path} is damaged: {problem}")

    def _described(self) -> Description:
        message = f"{self.path} is no session of lazyllm"
        length = int.from_bytes(self._data[:8].tobytes(), "little")
        if not 0 < length <= min(HEADER_LIMIT, len(self._data) - 8):
            raise ValueError(message)
        try:
            metadata = parse_object(self._data[8 : 8 + length].tobytes(), self.path)["__metadata__"]
            form, version = metadata["format"], metadata["version"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{message}, or is damaged") from None
        if form != FORMAT:
            raise ValueError(f"{message}: its format is {form!r}")
        if version != VERSION:
            raise ValueError(f"{self.path} has version {version} of the format; this lazyllm reads {VERSION}")
        try:
            description = Description(**parse_object(metadata["session"], self.path))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{message}, or is damaged") from None
        for name, value in vars(description).items():
            if not isinstance(value, KINDS.get(name, str)):
                self.damaged(f"{name} is {value!r:.80}")
        return description

    def tensor(self, name: str) -> np.ndarray:
        """The bytes of one tensor."""
        *_, begin, n_bytes = self._places[name]
        return self._data[begin : begin + n_bytes]

    @property
    def length(self) -> int:
        return len(self.tensor("kinds"))

    def method_for(self, model: Model, pruning: Method | None, progress: bool) -> Method:
        """The setting; ValueError if the session is of another one than `pruning`, or of another model."""
        saved = self.description
        try:
            method = parse_method(saved.pruning) if pruning is None else pruning
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path} is a session with {saved.pruning}; give it as pruning=: {error}"
            ) from None
        for name, here in identity(model, method, progress).items():
            if (stored := getattr(saved, name)) != here:
                models = f" ({saved.model} and {model.config.name})" if name == "sha256" else ""
                raise ValueError(
                    f"{self.path} is a session with {IDENTITY[name]} {stored}; here it is {here}{models}"
                )
        return method

    def prompts_and_turns(self, kinds: np.ndarray, method: Method) -> tuple[list[PromptPlace], list[Turn]]:
        """Of a context whose tokens are of these kinds."""
        try:
            prompts = [PromptPlace.checked(prompt) for prompt in self.description.prompts]
            turns = [Turn.checked(turn) for turn in self.description.turns]
            check_places(prompts, turns, kinds, method)
        except (TypeError, ValueError) as error:
            self.damaged(str(error))
        return prompts, turns

    def fill(self, core: _core.Session, config: ModelConfig) -> None:
        """Makes an empty session, of the same model and setting, what this one was."""
        try:
            core.set_tokens(*(self.tensor(name) for name in ("ids", "kinds", "depths", "gone")))
            for name in self._places:
                if name not in TOKENS:
                    part, _, layer = name.partition(".")
                    core.set_state(part, int(layer), self.tensor(name))
            if self.description.drawn is not None:
                core.drawn = self.description.drawn
            core.check_state()
        except (ValueError, OverflowError) as error:
            self.damaged(str(error))
        tensors = dict(layout(core, config, self.description))
        if tensors != {name: (dtype, shape, n) for name, dtype, shape, _, _, n in self._places.values()}:
            self.damaged("its tensors are not those of its tokens")


def check_places(prompts: list[PromptPlace], turns: list[Turn], kinds: np.ndarray, method: Method) -> None:
    """Raises ValueError for prompts and turns that are not where the context has prompt tokens."""
    prompt_tokens = np.flatnonzero(kinds != 1).tolist()
    if sum(place.n_run for place in prompts) != len(prompt_tokens) or prompt_tokens != [
        i for place in prompts for i in range(place.begins, place.begins + place.n_run)
    ]:
        raise ValueError("its prompts are not where its prompt tokens are")
    if not method.compresses and any(place.n_given < place.n_run for place in prompts):
        raise ValueError("a prompt has more tokens in the context than were given")
    begins, end = {place.begins for place in prompts}, 0
    for turn in turns:
        asks = turn.answer_begins <= len(kinds) and (kinds[turn.begins : turn.answer_begins] != 1).all()
        if turn.begins not in begins or not (end <= turn.begins < turn.answer_begins and (turn.cut or asks)):
            raise ValueError(f"no prompt reaches from {turn.begins} to {turn.answer_begins}, as a turn does")
        if turn.tools != turns[0].tools or (turn.cut and turn is not turns[-1]):
            raise ValueError("the turns are not those of one chat")
        end = turn.answer_begins
