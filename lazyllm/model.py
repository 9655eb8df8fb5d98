"""Model: a checkpoint opened on a device. It never changes and may be shared between threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.errors import CheckpointError


@dataclass(eq=False, repr=False)
class Model:
    """Configuration, weights and tokenizer of one checkpoint."""

    checkpoint: Checkpoint
    core: _core.Model
    compute: str = "f32"
    weights: str = "auto"
    kv: str = "f32"

    def __post_init__(self) -> None:
        self.config = self.checkpoint.config

    def __repr__(self) -> str:
        c = self.config
        threads = f", {self.threads} threads" if self.device == "cpu" else ""
        weights = f" in {self.weights}" if self.weights != "auto" else ""
        kv = f", K and V in {self.kv}" if self.core.kv != self.core.activations else ""
        return (
            f"<{type(self).__name__} {c.name or c.architecture}: {c.n_layers} layers of {c.hidden}, "
            f"{c.n_heads} heads ({c.n_kv_heads} KV), vocabulary {c.vocab}, context {c.context}, "
            f"{self.core.bytes / 2**20:.0f} MiB{weights} on {self.device} ({self.core.isa}{threads}{kv})>"
        )

    @property
    def device(self) -> str:
        return self.core.device

    @property
    def threads(self) -> int:
        return self.core.threads

    @property
    def tokenizer(self) -> Tokenizer:
        if self.checkpoint.tokenizer is None:
            raise CheckpointError(
                f"{self.checkpoint.path} has neither tokenizer.json nor tokenizer.model, nor a GGUF file's "
                "vocabulary; give token ids"
            )
        return self.checkpoint.tokenizer

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset((self.checkpoint.tokenizer or self.config).eos_token_ids)
