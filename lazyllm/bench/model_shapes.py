"""The shapes of well-known models, for ops and for models of random weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int

    @property
    def matrices(self) -> dict[str, tuple[str, int, int]]:
        """A layer's products: op, rows, cols."""
        width, kv_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "qkv": ("matmul", width + 2 * kv_width, self.hidden),
            "output": ("matmul", self.hidden, width),
            "gate and up": ("gated", 2 * self.ffn, self.hidden),
            "down": ("matmul", self.hidden, self.ffn),
        }


SMALL = ModelShape("135M", 30, 576, 9, 3, 64, 1536)
MEDIUM = ModelShape("1B", 16, 2048, 32, 8, 64, 8192)
LARGE = ModelShape("7B", 32, 4096, 32, 32, 128, 11008)
