"""A checkpoint's matrices in the formats of weights="q8" and "q4", rounded once and kept in the cache."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import Checkpoint, header_bytes, read_shard
from lazyllm.checkpoints.gguf_file import BLOCKS
from lazyllm.checkpoints.pypi_models import default_cache
from lazyllm.checkpoints.tensors import Tensor
from lazyllm.support.files import locked, whole_file
from lazyllm.support.json_text import json_digest
from lazyllm.support.progress import bar

FOLDER = "rounded"
VERSION = 1  # of the files; they are made anew when it changes
FLOATS = ("F32", "F16", "BF16")
BLOCK = 32  # values
BLOCK_BYTES = {name: n_bytes for name, _, n_bytes in BLOCKS.values()}
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
ROUTER = ".mlp.gate.weight"  # the end of its name; it is never rounded

Stored = tuple[list[str], list[Tensor]]
"""Shards and tensors, as in a checkpoint."""


def can_be_rounded(checkpoint: Checkpoint) -> bool:
    """True if no matrix is quantized and all consist of whole blocks."""
    return all(dtype in FLOATS and shape[-1] % BLOCK == 0 for _, dtype, shape, *_ in matrices(checkpoint))


def matrices(checkpoint: Checkpoint) -> list[Tensor]:
    return [
        tensor for tensor in checkpoint.tensors if len(tensor.shape) > 1 and not tensor.name.endswith(ROUTER)
    ]


def as_rounded(tensor: Tensor, weights: str) -> Tensor:
    """A matrix in the blocks that `weights` asks for, q8 or q4, see `load`."""
    dtype = "Q4_1" if weights == "q4" and tensor.name not in TABLES else "Q8_0"
    return tensor._replace(dtype=dtype, n_bytes=math.prod(tensor.shape) // BLOCK * BLOCK_BYTES[dtype])


def rounded_bytes(checkpoint: Checkpoint, weights: str) -> int:
    """The bytes of all matrices after rounding; the checkpoint must be one that can be rounded."""
    return sum(as_rounded(tensor, weights).n_bytes for tensor in matrices(checkpoint))


def rounded(checkpoint: Checkpoint, weights: str, progress: bool = True) -> Stored:
    """The checkpoint with matrices from a file in the cache, which is made first unless a whole one is there
    that was made from the same files."""
    place = json_digest(f"{checkpoint.path.resolve()} {weights}")[:16]
    path = default_cache() / FOLDER / f"{checkpoint.path.name}-{weights}-{place}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    source = f"{checkpoint.state}, version {VERSION}"
    with locked(path.with_suffix(".lock")):
        if source_of(path) != source:
            write(checkpoint, weights, path, source, progress)
    offsets = {tensor.name: tensor.offset for tensor in read_shard(path, 0)}
    n_shards = len(checkpoint.shards)
    tensors = [
        as_rounded(tensor, weights)._replace(shard=n_shards, offset=offsets[tensor.name])
        if tensor.name in offsets
        else tensor
        for tensor in checkpoint.tensors
    ]
    return [*checkpoint.shards, str(path)], tensors


def source_of(path: Path) -> str | None:
    """The source that a whole file names; None where there is no such file."""
    try:
        with safe_open(path, framework="np") as file:
            return (file.metadata() or {}).get("source")
    except (OSError, SafetensorError):
        return None


def write(checkpoint: Checkpoint, weights: str, path: Path, source: str, progress: bool) -> None:
    """Blocks are bytes: the safetensors format has no types for them."""
    todo = [(tensor, as_rounded(tensor, weights)) for tensor in matrices(checkpoint)]
    sizes = {blocks.name: ("U8", [blocks.n_bytes], blocks.n_bytes) for _, blocks in todo}
    with whole_file(path) as file, bar(len(todo), f"rounding to {weights}", "matrix", progress) as line:
        file.write(header_bytes(sizes, {"source": source}))
        for tensor, blocks in todo:
            for chunk in checkpoint.chunks(tensor):
                file.write(_core.quantize(_core.widen(chunk, tensor.dtype), blocks.dtype))
            line.update()
