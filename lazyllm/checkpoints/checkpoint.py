"""A model folder in Hugging Face layout: its config, and the place of each tensor in its files."""

import glob
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.families import FAMILIES
from lazyllm.checkpoints.fields import Fields, json_object, optional_fields, read_json
from lazyllm.checkpoints.tensors import Tensor, core_tensors, renamed
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.errors import CheckpointError
from lazyllm.support.files import OpenedFile, digest, user_path
from lazyllm.support.optional import fetch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"[^/\\]+\.safetensors")
MOST_DIMENSIONS = 8
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
TOKENIZER_PARTS = (
    *VOCABULARIES,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",  # names end tokens
)
HUB_FILES = ["config.json", *TOKENIZER_PARTS, INDEX_FILE, "*.safetensors"]
HUB_IGNORED = [
    "*/*",  # subfolders, which patterns look into
    "*consolidated*",  # the weights once more, under the names of the authors' own code
]
TEXT_MODEL = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""By prefix of the text model's tensors in multimodal checkpoints, old or new: that in text checkpoints."""

CHUNK_BYTES = 1 << 23


def resolve(path_or_id: str | Path, revision: str | None = None, file: str | None = None) -> Path:
    """The folder or GGUF file of a checkpoint: a path as it is, or a hub id fetched into the hub's cache.

    `revision` is a branch, tag or commit of the hub; `file` is a GGUF file in the folder or repository.
    """
    if not isinstance(path_or_id, str | Path) or not str(path_or_id):
        raise TypeError(f"path must be a folder, a GGUF file or a hub id such as owner/name, not {path_or_id!r}")
    path_or_id = str(path_or_id).removeprefix("https://huggingface.co/")
    path = user_path(path_or_id)
    if path.suffix == ".safetensors" and path.is_file():
        raise ValueError(f"{path} is a file of a checkpoint; give the checkpoint's folder, {path.parent}")
    if path.exists():
        if revision is not None:
            raise ValueError(f"revision is for hub ids, and {path} exists here; leave revision away")
        if file is None or (path / file).is_file():
            return path / (file or "")
        raise FileNotFoundError(f"{path} has no {file}{gguf_choice(found.name for found in path.glob('*'))}")
    if path.suffix == ".gguf" or not HUB_ID.fullmatch(path_or_id):
        raise FileNotFoundError(f"{path} does not exist, nor has it the form of a hub id (owner/name)")
    what = f"{path_or_id}, which is no folder here,"
    return fetch(what, lambda client: download(client, path_or_id, revision, file))


def download(client: Any, model_id: str, revision: str | None, file: str | None) -> str:
    """The path in the hub's cache of the folder with the files that are used, or of the GGUF file."""
    if file is None:
        weights, patterns, ignored = [SINGLE_FILE, INDEX_FILE], HUB_FILES, HUB_IGNORED
    else:
        weights, patterns, ignored = [file], [glob.escape(file)], []
    folder = client.snapshot_download(model_id, revision=revision, allow_patterns=patterns, ignore_patterns=ignored)
    if any(Path(folder, name).is_file() for name in weights):
        return os.path.join(folder, file or "")
    names = client.list_repo_files(model_id, revision=revision)
    raise CheckpointError(f"it has no {' or '.join(weights)}{gguf_choice(names)}")


def gguf_choice(names: Iterable[str]) -> str:
    """The end of an error about missing weights: the GGUF files among `names`, as a hint; empty without any."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    return f"; `file` takes one of its GGUF files: {', '.join(ggufs)}" if ggufs else ""


class Checkpoint:
    """A checkpoint on disk: its `path`, its `config`, the paths of its `shards`, and the `tensors` table that
    the core takes. `generation_config` has the contents of generation_config.json, {} without such a file.

    The model's outputs depend on `config_files` and `shard_files`, the ids of a text on `tokenizer_files`.
    All stay open, so that their digests are those of the loaded contents.

    The table of a multimodal checkpoint holds its text model only; the vision tower is never read.
    """

    def __init__(self, folder: Path):
        self.path = folder
        self.config_files = opened(self.path, ["config.json"])
        self.tokenizer_files = opened(self.path, TOKENIZER_PARTS)
        self.generation_config = optional_fields(self.path / "generation_config.json").values
        self.config = ModelConfig.from_folder(self.path)
        names, placed = list_shards(self.path)
        self.shards = [str(self.path / name) for name in names]
        self.shard_files = [OpenedFile(shard) for shard in self.shards]
        tensors = [
            tensor
            for index, name in enumerate(names)
            for tensor in read_shard(self.path / name, index)
            if placed.get(tensor.name, name) == name
        ]
        for missing in placed.keys() - {tensor.name for tensor in tensors}:
            raise CheckpointError(f"{self.path / INDEX_FILE}: {placed[missing]} has no tensor {missing!r}")
        family = FAMILIES[self.config.architecture]
        if family.multimodal:  # the vision tower has other prefixes
            tensors = [
                tensor._replace(name=text_prefix + tensor.name.removeprefix(prefix))
                for tensor in tensors
                for prefix, text_prefix in TEXT_MODEL.items()
                if tensor.name.startswith(prefix)
            ]
        named = (tensor._replace(name=renamed(tensor.name, family.renamed)) for tensor in tensors)
        self.tensors = list(core_tensors(named, self.config, self.path))

    def changed(self) -> Path | None:
        """A file that has been written to or replaced since it was opened; None if there is none."""
        files = (*self.shard_files, *self.config_files, *self.tokenizer_files)
        return next((file.path for file in files if not file.is_current()), None)

    def weights_digest(self, progress: bool) -> str:
        """SHA-256 of config and weights as they were opened, whatever their paths lead to now."""
        return digest([*self.config_files, *self.shard_files], progress)

    def chunks(self, tensor: Tensor, together: int = 1) -> Iterator[bytes]:
        """The bytes of a tensor in chunks of bounded size, each a multiple of `together` rows."""
        least = max(tensor.n_bytes // max(math.prod(tensor.shape[:-1]), 1), 1) * together
        step = max(CHUNK_BYTES // least, 1) * least
        for begin in range(0, tensor.n_bytes, step):
            yield self.shard_files[tensor.shard].read(tensor.offset + begin, min(step, tensor.n_bytes - begin))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the folder has no vocabulary, and prompts must be token ids."""
        if not any(file.path.name in VOCABULARIES for file in self.tokenizer_files):
            return None
        tokenizer = Tokenizer.from_folder(self.path, self.config)
        before, now = self.tokenizer_files, opened(self.path, TOKENIZER_PARTS)
        if [file.state for file in before] != [file.state for file in now]:
            raise OSError(f"{self.path}: the tokenizer was changed after the model was loaded; load it again")
        return tokenizer


def opened(folder: Path, names: Iterable[str]) -> list[OpenedFile]:
    """The files with these names in the folder, opened; those that do not exist are left out."""
    return [OpenedFile(path) for name in names if (path := folder / name).is_file()]


def list_shards(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The safetensors files of a folder, and the file of each tensor according to its index."""
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE], {}
    if (folder / INDEX_FILE).exists():
        index = Fields(folder / INDEX_FILE, read_json(folder / INDEX_FILE))
        weight_map = index.section("weight_map")
        if not (placed := weight_map.values):
            index.refuse("weight_map", "an object naming the file of each tensor")
        for tensor, name in placed.items():
            if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
                weight_map.refuse(tensor, "the plain name of a .safetensors file")
        names = sorted(set(placed.values()))
        for name in names:
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder / name} is missing; {INDEX_FILE} names it")
        return names, placed
    if any(path.suffix in (".bin", ".pth", ".pt") for path in folder.iterdir()):
        raise CheckpointError(
            f"{folder} holds its weights as pickles, which can run code and are never opened; if you trust "
            "it, let transformers write it anew: from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise CheckpointError(f"{folder} has no {SINGLE_FILE}{gguf_choice(os.listdir(folder))}")


def read_shard(path: Path, index: int) -> list[Tensor]:
    """The tensors of one file. The safetensors package checks it; it does not give offsets in the file."""
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json_object(path, file.read(length))
    header.pop("__metadata__", None)
    tensors: list[Tensor] = []
    for name, entry in header.items():
        (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
        if len(shape) > MOST_DIMENSIONS or "\0" in name:
            raise CheckpointError(
                f"{path}: tensor {name!r:.80} has {len(shape)} dimensions; expected at most "
                f"{MOST_DIMENSIONS}, and a name without NUL"
            )
        tensors.append(Tensor(name, entry["dtype"], shape, index, 8 + length + begin, end - begin))
    return tensors


def header_bytes(tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file whose tensors, as (dtype, shape, bytes), follow in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, n_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
