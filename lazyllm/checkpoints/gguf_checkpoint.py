"""A model in one GGUF file, whose weights are used as they are stored."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from lazyllm.checkpoints.checkpoint import Checkpoint, Tensor
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.gguf import GgufModel
from lazyllm.checkpoints.gguf_tokenizer import GgufVocabulary
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.support.files import OpenedFile


class GgufCheckpoint(Checkpoint):
    """Like `Checkpoint`, from a GGUF file in place of a folder; its tensors have Hugging Face's names."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.shards = [str(self.path)]
        self.shard_files = self.tokenizer_files = [OpenedFile(self.path)]
        self.config_files = []
        self.model = GgufModel(self.path)
        config = ModelConfig.from_dict(
            self.model.config("float32"), self.model.generation_config(), source=self.path
        )
        self.config = replace(
            config, name=self.path.stem, norm_plus_one=False, paired_rope=self.model.arch == "llama"
        )
        self.tensors = [self.entry(name) for name in self.model.names]

    def entry(self, name: str) -> Tensor:
        stored = self.model.tensors[name]
        shape = tuple(reversed(stored.shape))
        return (self.model.names[name], stored.kind, shape, 0, stored.offset, stored.n_bytes)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        if "tokenizer.ggml.model" not in self.model.metadata:
            return None
        vocabulary = GgufVocabulary(self.path, self.model.metadata, self.model.vocab)
        return Tokenizer.from_gguf(vocabulary, self.config)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, or in a GGUF file."""
    return GgufCheckpoint(path) if path.is_file() else Checkpoint(path)
