"""A checkpoint as the F16 GGUF file that llama.cpp runs; without a tokenizer: it is given token ids."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lazyllm.checkpoint import Checkpoint, Tensor
from lazyllm.config import MODEL_TYPES, ModelConfig
from lazyllm.gguf import LAYER_TENSORS, TOP_TENSORS

ARCHITECTURES = {name: "llama" if kind == "mistral" else kind for name, kind in MODEL_TYPES.items()}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
PLAIN_TOLERANCE = 1e-4  # of rotary frequencies


def f16_gguf(folder: Path, cache: Path) -> Path:
    """The file of that checkpoint in `cache`, written on the first call."""
    checkpoint = Checkpoint(folder)
    target = cache / f"{checkpoint.hash()[:16]}.f16.gguf"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        write(checkpoint, partial)
        partial.replace(target)
    return target


def write(checkpoint: Checkpoint, path: Path) -> None:
    from gguf import GGUFWriter

    config = checkpoint.config
    names = {tensor[0]: gguf_name(tensor[0]) for tensor in checkpoint.tensors}
    theta, divisors = rotary(config)
    writer = GGUFWriter(path, ARCHITECTURES[config.architecture])
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(config.vocab)
    writer.add_tokenizer_model("none")
    tensors = [
        tensor for tensor in checkpoint.tensors if names[tensor[0]] != "output.weight" or not config.tied
    ]
    for tensor in tensors:
        width = width_of(tensor)
        size = math.prod(tensor[2]) * np.dtype(width).itemsize
        writer.add_tensor_info(names[tensor[0]], tensor[2], np.dtype(width), size)
    if divisors is not None:
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in contents(checkpoint, tensors):
        writer.write_tensor_data(values)
    if divisors is not None:
        writer.write_tensor_data(divisors)
    writer.close()


def contents(checkpoint: Checkpoint, tensors: list[Tensor]) -> Iterator[np.ndarray]:
    config = checkpoint.config
    for tensor in tensors:
        values = decoded(checkpoint, tensor)
        if ARCHITECTURES[config.architecture] == "llama":
            for projection, heads in (("q_proj", config.n_heads), ("k_proj", config.n_kv_heads)):
                if f".{projection}." in tensor[0]:
                    values = interleaved(values, heads)
        yield values.astype(width_of(tensor))


def width_of(tensor: Tensor) -> type[np.floating]:
    """Matrices become F16; norms and biases stay F32, as llama.cpp's own files have them."""
    return np.float16 if len(tensor[2]) > 1 else np.float32


def gguf_name(name: str) -> str:
    top = {theirs: ours for ours, theirs in TOP_TENSORS.items()}
    if name in top:
        return top[name]
    parts = {theirs: ours for ours, theirs in LAYER_TENSORS.items()}
    if (found := LAYER.fullmatch(name)) and found[2] in parts:
        return f"blk.{found[1]}.{parts[found[2]]}.{found[3]}"
    raise ValueError(f"tensor {name!r} has no name in a GGUF file")


def decoded(checkpoint: Checkpoint, tensor: Tensor) -> np.ndarray:
    _, dtype, shape, shard, offset, _ = tensor
    stored = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype]
    data = np.memmap(checkpoint.shards[shard], stored, "r", offset, shape)
    return (data.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else np.asarray(data)


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Each head's rows in the order of llama.cpp's rotation, which turns neighbours instead of halves."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def rotary(config: ModelConfig) -> tuple[float, np.ndarray | None]:
    """The base of the rotary frequencies, and by what each is divided if they are scaled."""
    if config.rope_scale != 1.0:
        raise ValueError("rotary embeddings with a scale of their own (yarn) have no place in this file")
    frequencies = np.array(config.inv_freq)
    theta = float((frequencies[0] / frequencies[1]) ** (config.head_dim / 2))
    divisors = theta ** -(np.arange(frequencies.size) * 2 / config.head_dim) / frequencies
    if np.allclose(divisors, 1.0, rtol=PLAIN_TOLERANCE):
        return theta, None
    if ARCHITECTURES[config.architecture] != "llama":
        raise ValueError(f"scaled rotary embeddings of {config.architecture} have no place in this file")
    return theta, divisors.astype(np.float32)
