"""Toy files for tokenizers and GGUF: a SentencePiece model and a writer of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

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
