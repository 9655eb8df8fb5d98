"""Toy files for tokenizers and GGUF: a SentencePiece model and a writer of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from families import FAMILIES, RECORDED

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.gguf_checkpoint import FIELDS, GEMMA_TENSORS, LAYER_TENSORS, SOFT_CAPS, TOP_TENSORS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
LETTERS = [chr(byte) for byte in range(0x21, 0x7E)] + ["Ġ"]
Files = tuple[dict[str, Any], dict[str, np.ndarray]]
"""The metadata and tensors of a GGUF file."""
CORPUS = ["the quick brown fox jumps over the lazy dog, it's 2024", "def f(x): return x", "hello world"] * 5


def train_pieces(folder: Path) -> Path:
    """Trains a SentencePiece model like Llama's: BPE with byte fallback that preserves white space."""
    from sentencepiece import SentencePieceTrainer

    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: str | dict[str, str] = "F32"
) -> Path:
    """Writes a GGUF file; vectors are stored as F32, matrices as ggml type `kind`, or the one that it has for
    them. A matrix of bytes is one of blocks already."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, metadata["general.architecture"])
    for name, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif name != "general.architecture":
            writer.add_string(name, value)
    for name, values in tensors.items():
        name_of_type = "F32" if values.ndim == 1 else kind if isinstance(kind, str) else kind[name]
        stored = GGMLQuantizationType[name_of_type]
        blocks = values if values.dtype == np.uint8 else quantize(values, stored)
        writer.add_tensor(name, blocks, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_metadata(pre: str, merges: list[str], extra: tuple[str, ...] = ("<end>",)) -> dict[str, Any]:
    merges = ["h i", *merges]
    tokens = [*LETTERS, *(merge.replace(" ", "") for merge in merges), *extra]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in extra else NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def stored_values(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint in float32."""
    found = Checkpoint(folder)
    return {
        tensor.name: _core.widen(b"".join(found.chunks(tensor)), tensor.dtype).reshape(tensor.shape)
        for tensor in found.tensors
    }


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleaves the two halves of each head's rows, which is the order of q and k in llama GGUF files."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def as_gguf(family: str) -> Files:
    """A GGUF file with a family's recorded checkpoint."""
    return gguf_files(FAMILIES[family].config, stored_values(RECORDED / "families" / family))


def gguf_files(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Files:
    """A GGUF file of the model that a folder in Hugging Face layout would have with this config.json."""
    arch = config["model_type"].removesuffix("_text")
    gemma = arch in ("gemma2", "gemma3")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    # the vocabulary is the tokenizer's, whose size may differ from the configuration's
    fields = {key: config[name] for name, key in FIELDS.items() if name in config and name != "vocab_size"}
    fields["attention.head_count_kv"] = kv_heads
    if "head_dim" in config:
        fields["rope.dimension_count"] = config["head_dim"]
    if scaling := config.get("rope_scaling"):
        fields |= {"rope.scaling.type": scaling.get("type", scaling.get("rope_type"))}
        fields |= {"rope.scaling.factor": scaling["factor"]}
        fields |= {"rope.scaling.original_context_length": scaling.get("original_max_position_embeddings", 1)}
    if gemma:
        for name in ("sliding_window", "sliding_window_pattern"):
            if name in config:
                fields[f"attention.{name}"] = config[name]
    fields |= {name: config[name] for name in SOFT_CAPS if name in config}
    metadata = {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in fields.items()}
    short = {hf: name for name, hf in TOP_TENSORS.items()}
    kinds = {hf: name for name, hf in (GEMMA_TENSORS if gemma else LAYER_TENSORS).items()}
    tensors = {}
    for hf, values in weights.items():
        if gemma and hf.endswith("norm.weight"):
            values = values + np.float32(1)
        if hf in short:
            tensors[short[hf]] = values
            continue
        layer, _, rest = hf.removeprefix("model.layers.").partition(".")
        kind, _, suffix = rest.rpartition(".")
        if arch == "llama" and kinds[kind] in ("attn_q", "attn_k"):
            values = interleaved(values, heads if kinds[kind] == "attn_q" else kv_heads)
        tensors[f"blk.{layer}.{kinds[kind]}.{suffix}"] = values
    return metadata | byte_level_metadata("gpt-2", []), tensors
