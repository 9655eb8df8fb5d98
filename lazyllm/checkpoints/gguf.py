"""Conversion of GGUF files to folders in Hugging Face layout."""

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import header_bytes
from lazyllm.checkpoints.families import FAMILIES
from lazyllm.checkpoints.gguf_checkpoint import GgufCheckpoint
from lazyllm.checkpoints.tensors import Tensor, renamed
from lazyllm.support import checked
from lazyllm.support.files import leave_cache, user_path
from lazyllm.support.progress import bar

DTYPES = {"bf16": ("BF16", 2, "bfloat16"), "f16": ("F16", 2, "float16"), "f32": ("F32", 4, "float32")}


def convert(file: str | Path, out_folder: str | Path, dtype: str = "bf16", progress: bool = True) -> Path:
    """Write the GGUF file as a Hugging Face folder (config, tokenizer, one safetensors file) and return it.

    Quantized weights are de-quantized to `dtype` ("bf16", "f16" or "f32"). The folder gets its name when it
    is complete.
    """
    checked.choice(dtype, "dtype", tuple(DTYPES))
    target = user_path(out_folder)
    check_new(target)
    checkpoint = GgufCheckpoint(user_path(file))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        partial = Path(scratch) / target.name
        partial.mkdir()
        if checkpoint.tokenizer and (vocabulary := checkpoint.vocabulary):
            vocabulary.backend.save(str(partial / "tokenizer.json"))
            write_json(partial / "tokenizer_config.json", vocabulary.settings)
        write_json(partial / "config.json", checkpoint.config_json | {"torch_dtype": DTYPES[dtype][2]})
        write_json(partial / "generation_config.json", checkpoint.generation_config)
        write_weights(checkpoint, partial / "model.safetensors", dtype, progress)
        return partial.rename(target)


def check_new(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty folder; give a new one")


def write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def write_weights(checkpoint: GgufCheckpoint, path: Path, dtype: str, progress: bool) -> None:
    stored, width, _ = DTYPES[dtype]
    tensors, names = checkpoint.named_tensors, FAMILIES[checkpoint.architecture].renamed
    files_names = {new: old for old, new in reversed([*names.items()])}
    entries = {
        renamed(tensor.name, files_names): (stored, tensor.shape, math.prod(tensor.shape) * width) for tensor in tensors
    }
    with path.open("wb") as file, bar(len(tensors), "converting", "tensor", progress) as line:
        file.write(header_bytes(entries, {"format": "pt"}))
        for tensor in tensors:
            for values in hugging_face_values(checkpoint, tensor):
                file.write(encode_floats(values, dtype))
            line.update()
        leave_cache(file)


def hugging_face_values(checkpoint: GgufCheckpoint, tensor: Tensor) -> Iterator[np.ndarray]:
    """The float32 values of a tensor, some rows at a time: q and k of a Llama in Hugging Face's order of rows
    (in each head the first of all pairs, then the second), Gemma's norms without the added 1."""
    config, projection = checkpoint.config, tensor.name.split(".")[-2]
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}.get(projection, 0)
    paired = checkpoint.is_paired and heads
    if paired and tensor.shape[0] != heads * config.head_dim:
        checkpoint.refuse_tensor(tensor.name, f"has {tensor.shape[0]} rows; expected {heads} x {config.head_dim}")
    for chunk in checkpoint.chunks(tensor, config.head_dim if paired else 1):
        values = _core.widen(chunk, tensor.dtype)
        if paired:
            columns = math.prod(tensor.shape[1:])
            values = values.reshape(-1, config.head_dim // 2, 2, columns).swapaxes(1, 2).ravel()
        added_one = checkpoint.gemma and tensor.name.endswith("norm.weight")
        yield values - np.float32(1) if added_one else values


def encode_floats(values: np.ndarray, dtype: str) -> bytes:
    if dtype != "bf16":
        return values.astype(np.float16 if dtype == "f16" else np.float32).tobytes()
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype(np.uint16).tobytes()
