"""Writes a checkpoint as a GGUF file for llama.cpp, without a tokenizer: the peer gets token ids."""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.llama_cpp_peer import silent_api
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.families import FAMILIES
from lazyllm.checkpoints.gguf_checkpoint import TOP_TENSORS, layer_tensors
from lazyllm.checkpoints.tensors import Tensor

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}  # where GGUF's name is not the model type's
WRITTEN = ("llama", "qwen2", "qwen3", "gemma3")
GEMMA3_PATTERN, GEMMA3_LOCAL_THETA = 6, 10000.0  # which llama.cpp assumes
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
QUANTIZED = {"Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_K": "Q4_K_S"}  # llama.cpp's names of files of these blocks
UNSCALED_TOLERANCE = 1e-4  # relative, of rotary frequencies


def gguf_file(folder: Path, kind: str, cache: Path) -> Path:
    """Path of the checkpoint's file in `cache`, its matrices in F16, BF16 or, rounded by llama.cpp, in blocks
    of QUANTIZED; the first call writes it."""
    checkpoint = Checkpoint(folder)
    target = cache / f"{checkpoint.weights_digest(progress=False)[:16]}.{kind.lower()}.gguf"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        if kind in QUANTIZED:
            quantize_file(gguf_file(folder, "BF16", cache), QUANTIZED[kind], partial)
        else:
            write(checkpoint, kind, partial)
        partial.replace(target)
    return target


def quantize_file(source: Path, kind: str, path: Path) -> None:
    """All matrices in one format; llama.cpp takes another where rows are no multiple of its blocks."""
    api = silent_api()
    settings = api.llama_model_quantize_default_params()
    settings.ftype, settings.pure = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
    if api.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp does not write {source.name} as {kind}")


def architecture(config: ModelConfig) -> str:
    kind = FAMILIES[config.architecture].model_type
    return ARCHITECTURES.get(kind, kind)


def write(checkpoint: Checkpoint, kind: str, path: Path) -> None:
    from gguf import GGUFWriter
    from gguf.quants import quantize

    config = checkpoint.config
    arch = architecture(config)
    if arch not in WRITTEN:
        raise ValueError(f"a GGUF file written here cannot hold the features of {config.architecture}")
    names = {tensor[0]: gguf_name(tensor[0], arch) for tensor in checkpoint.tensors}
    theta, divisors = rotary(config)
    writer = GGUFWriter(path, arch)
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
    if any(config.windows):
        writer.add_sliding_window(window_of(config))
    tensors = [tensor for tensor in checkpoint.tensors if names[tensor[0]] != "output.weight" or not config.tied]
    for tensor in tensors:
        stored = quantize(np.zeros((1, tensor[2][-1]), np.float32), kind_of(tensor, kind))
        shape, size = ((*tensor[2][:-1], stored.shape[-1]), stored.nbytes * (tensor[2][0] if len(tensor[2]) > 1 else 1))
        writer.add_tensor_info(names[tensor[0]], shape, stored.dtype, size, kind_of(tensor, kind))
    if divisors is not None:
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, values in contents(checkpoint, tensors):
        writer.write_tensor_data(quantize(values, kind_of(tensor, kind)))
    if divisors is not None:
        writer.write_tensor_data(divisors)
    writer.close()


def window_of(config: ModelConfig) -> int:
    """The window of a Gemma 3 whose layers, ropes and scores are as llama.cpp assumes them."""
    wanted = tuple(
        0 if layer % GEMMA3_PATTERN == GEMMA3_PATTERN - 1 else max(config.windows) for layer in range(config.n_layers)
    )
    local = GEMMA3_LOCAL_THETA ** -(np.arange(config.head_dim // 2) * 2 / config.head_dim)
    as_assumed = config.windows == wanted and np.allclose(config.inv_freq[-1], local, rtol=UNSCALED_TOLERANCE)
    if architecture(config) != "gemma3" or config.query_scalar != config.head_dim or not as_assumed:
        raise ValueError(f"a GGUF file written here cannot hold the windows of {config.name}")
    return max(config.windows)


def contents(checkpoint: Checkpoint, tensors: list[Tensor]) -> Iterator[tuple[Tensor, np.ndarray]]:
    config = checkpoint.config
    for tensor in tensors:
        values = decoded(checkpoint, tensor).astype(np.float32)
        if architecture(config) == "llama":
            for projection, heads in (("q_proj", config.n_heads), ("k_proj", config.n_kv_heads)):
                if f".{projection}." in tensor[0]:
                    values = interleaved(values, heads)
        if config.norm_plus_one and "norm" in tensor[0]:
            values = values + np.float32(1)
        yield tensor, values


def kind_of(tensor: Tensor, kind: str) -> Any:
    """Matrices become F16 or BF16; norms and biases stay F32, as llama.cpp's own files have them."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[kind if len(tensor[2]) > 1 else "F32"]


def gguf_name(name: str, arch: str) -> str:
    top = {theirs: ours for ours, theirs in TOP_TENSORS.items()}
    if name in top:
        return top[name]
    parts = {theirs: ours for ours, theirs in layer_tensors(arch).items()}
    if (found := LAYER.fullmatch(name)) and found[2] in parts:
        return f"blk.{found[1]}.{parts[found[2]]}.{found[3]}"
    raise ValueError(f"tensor {name!r} has no name in a GGUF file")


def decoded(checkpoint: Checkpoint, tensor: Tensor) -> np.ndarray:
    _, dtype, shape, shard, offset, _ = tensor
    stored = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[dtype]
    data = np.memmap(checkpoint.shards[shard], stored, "r", offset, shape)
    return (data.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else np.asarray(data)


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of each head for llama.cpp, which rotates adjacent rows instead of the two halves."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def rotary(config: ModelConfig) -> tuple[float, np.ndarray | None]:
    """The base of the rotary frequencies, and the divisor of each frequency if they are scaled."""
    if config.rope_scale[0] != 1.0:
        raise ValueError("a GGUF file written here cannot hold rotary embeddings with an output scale (yarn)")
    frequencies = np.array(config.inv_freq[0])
    theta = float((frequencies[0] / frequencies[1]) ** (config.head_dim / 2))
    divisors = theta ** -(np.arange(frequencies.size) * 2 / config.head_dim) / frequencies
    if np.allclose(divisors, 1.0, rtol=UNSCALED_TOLERANCE):
        return theta, None
    if architecture(config) != "llama":
        raise ValueError(f"a GGUF file written here cannot hold scaled rotary embeddings of {config.architecture}")
    return theta, divisors.astype(np.float32)
