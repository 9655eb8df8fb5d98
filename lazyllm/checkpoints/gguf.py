"""GGUF files of Llama-family models and Gemma 3: their contents, and conversion to a Hugging Face folder."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import header_bytes
from lazyllm.checkpoints.config import (
    GEMMA3_DEFAULTS,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_WIDTH,
    MODEL_TYPES,
)
from lazyllm.checkpoints.fields import Fields
from lazyllm.checkpoints.gguf_file import FORMATS, GgufTensor, read_gguf
from lazyllm.checkpoints.gguf_tokenizer import GgufVocabulary
from lazyllm.checkpoints.rope import MAX_CONTEXT, MAX_FACTOR, MAX_THETA, frequency_divisors, llama3
from lazyllm.errors import CheckpointError
from lazyllm.support.files import user_path
from lazyllm.support.progress import bar

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
DTYPES = {"bf16": ("BF16", 2, "bfloat16"), "f16": ("F16", 2, "float16"), "f32": ("F32", 4, "float32")}
TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_TENSORS = LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_TENSOR = re.compile(r"blk\.(?P<layer>[0-9]{1,9})\.(?P<kind>\w+)\.(?P<suffix>weight|bias)")
GEMMA3_27B_LAYERS = 62
LLAMA31_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CHUNK_VALUES = 1 << 22


def convert(
    gguf_path: str | Path, out_folder: str | Path, dtype: str = "bf16", progress: bool = True
) -> Path:
    """Write `gguf_path` as a Hugging Face folder (config, tokenizer, one safetensors file) and return it.

    Quantized weights are de-quantized to `dtype` ("bf16", "f16" or "f32"). The folder gets its name when it
    is complete.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    target = user_path(out_folder)
    check_new(target)
    model = GgufModel(user_path(gguf_path))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        vocabulary = GgufVocabulary(model.path, model.metadata, model.vocab)
        vocabulary.backend().save(str(partial / "tokenizer.json"))
        write_json(partial / "tokenizer_config.json", vocabulary.settings())
        write_json(partial / "config.json", model.config(DTYPES[dtype][2]))
        write_json(partial / "generation_config.json", model.generation_config())
        model.write_weights(partial / "model.safetensors", dtype, progress)
        partial.chmod(0o755)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def check_new(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty folder; give a new one")


def write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


class GgufModel:
    """An open GGUF file of a model that runs here, its metadata and tensor list checked."""

    def __init__(self, path: Path):
        self.path = path
        self.metadata, self.tensors = read_gguf(path)
        self.arch = str(self.metadata.get("general.architecture"))
        if self.arch not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: general.architecture is {self.arch!r}; supported are {', '.join(ARCHITECTURES)}"
            )
        self.fields = Fields(path, self.metadata, prefix=f"{self.arch}.")
        if self.fields.get("expert_count", 0) != 0:
            self.fields.refuse("expert_count", "0: mixtures of experts are not supported")
        self.layers = self.fields.whole("block_count", MAX_LAYERS)
        self.hidden = self.fields.whole("embedding_length", MAX_WIDTH)
        self.heads = self.fields.whole("attention.head_count", MAX_WIDTH)
        self.kv_heads = self.fields.whole("attention.head_count_kv", self.heads, default=self.heads)
        self.head_dim = self.fields.whole(
            "attention.key_length", MAX_HEAD_DIM, default=self.hidden // self.heads
        )
        if self.fields.get("rope.dimension_count", self.head_dim) != self.head_dim:
            self.fields.refuse(
                "rope.dimension_count", f"{self.head_dim}: partial rotary embeddings are not supported"
            )
        self.layer_tensors = GEMMA3_TENSORS if self.arch == "gemma3" else LAYER_TENSORS
        self.names = self.hugging_face_names()
        self.vocab = self.tensors["token_embd.weight"].shape[1]

    def hugging_face_names(self) -> dict[str, str]:
        names = {}
        for name in filter("rope_freqs.weight".__ne__, self.tensors):
            part = LAYER_TENSOR.fullmatch(name)
            if name in TOP_TENSORS:
                names[name] = TOP_TENSORS[name]
            elif part and part["kind"] in self.layer_tensors:
                layer, kind = int(part["layer"]), self.layer_tensors[part["kind"]]
                names[name] = f"model.layers.{layer}.{kind}.{part['suffix']}"
            else:
                self.refuse_tensor(name, f"has no place in a {ARCHITECTURES[self.arch]} model")
        for needed in ("token_embd.weight", "output_norm.weight"):
            if needed not in names:
                self.refuse_tensor(needed, "is missing")
        if len(self.tensors["token_embd.weight"].shape) != 2:
            self.refuse_tensor("token_embd.weight", "is not a matrix")
        return names

    def refuse_tensor(self, name: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: tensor {name!r} {problem}")

    def config(self, torch_dtype: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.arch]],
            "model_type": MODEL_TYPES[ARCHITECTURES[self.arch]],
            "hidden_size": self.hidden,
            "intermediate_size": self.fields.whole("feed_forward_length", MAX_WIDTH),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.fields.whole("context_length", MAX_CONTEXT),
            "rms_norm_eps": shortest_float(self.fields.number("attention.layer_norm_rms_epsilon", 0.0, 0.1)),
            "rope_theta": shortest_float(
                self.fields.number("rope.freq_base", 1.0, MAX_THETA, default=10000.0)
            ),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "torch_dtype": torch_dtype,
            **self.special_ids(),
            **(self.gemma3_config() if self.arch == "gemma3" else {"hidden_act": "silu"}),
        }
        if scaling := self.rope_scaling(config["rope_theta"]):
            config["rope_scaling"] = scaling
        if self.arch == "llama" and "blk.0.attn_q.bias" in self.tensors:
            config["attention_bias"] = True
        return config

    def gemma3_config(self) -> dict[str, Any]:
        """The fields that only Gemma 3 has; where a file leaves one out, the value that llama.cpp assumes."""
        if self.fields.get("final_logit_softcapping", 0.0) != 0.0:
            self.fields.refuse("final_logit_softcapping", "0: soft caps are not supported")
        window = self.fields.whole("attention.sliding_window", MAX_CONTEXT, default=0, low=0)
        pattern = self.fields.whole(
            "attention.sliding_window_pattern", MAX_LAYERS, default=GEMMA3_DEFAULTS["sliding_window_pattern"]
        )
        local_theta = self.fields.number("rope.freq_base_swa", 1.0, MAX_THETA, default=10000.0)
        is_27b = self.layers == GEMMA3_27B_LAYERS
        return {
            "hidden_activation": GEMMA3_DEFAULTS["hidden_activation"],
            "query_pre_attn_scalar": self.hidden // self.heads if is_27b else self.head_dim,
            "rope_local_base_freq": shortest_float(local_theta),
            **({"sliding_window": window} if window else {}),
            "sliding_window_pattern": pattern if window else 1,
        }

    def generation_config(self) -> dict[str, Any]:
        ids = self.special_ids()
        end, turn_end = ids["eos_token_id"], self.metadata.get("tokenizer.ggml.eot_token_id")
        if turn_end not in (None, end):
            ids["eos_token_id"] = turn_end if end is None else [end, turn_end]
        return ids

    def special_ids(self) -> dict[str, Any]:
        return {
            f"{name}_token_id": self.metadata.get(f"tokenizer.ggml.{name}_token_id")
            for name in ("bos", "eos")
        }

    def rope_scaling(self, theta: float) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self.tensors:
            return self.llama3_scaling(theta)
        kind = self.fields.get("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            self.fields.refuse("rope.scaling.type", "none, linear or yarn")
        factor = self.fields.number("rope.scaling.factor", 0.0, MAX_FACTOR)
        scaling: dict[str, Any] = {"rope_type": kind, "factor": shortest_float(factor)}
        if kind == "yarn":
            original = self.fields.whole("rope.scaling.original_context_length", MAX_CONTEXT)
            scaling["original_max_position_embeddings"] = original
        return scaling

    def llama3_scaling(self, theta: float) -> dict[str, Any]:
        """Recovers Llama 3.1's scaling rule, which a GGUF file stores as one divisor per frequency."""
        divisors = np.concatenate(list(self.values("rope_freqs.weight", None)))
        factor = shortest_float(float(divisors.max(initial=1.0)))
        scaling = {"rope_type": "llama3", "factor": factor, **LLAMA31_ROPE}
        plain = 1 / frequency_divisors(theta, self.head_dim)
        original = LLAMA31_ROPE["original_max_position_embeddings"]
        expected = plain / llama3(plain, Fields(self.path, scaling), int(original))
        if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
            raise CheckpointError(
                f"{self.path}: rope_freqs.weight does not follow Llama 3.1's rule ({LLAMA31_ROPE})"
            )
        return scaling

    def write_weights(self, path: Path, dtype: str, progress: bool) -> None:
        stored, width, _ = DTYPES[dtype]
        entries = {}
        for name, hf_name in self.names.items():
            shape = self.tensors[name].shape[::-1]
            entries[hf_name] = stored, shape, math.prod(shape) * width
        with path.open("wb") as file, bar(len(self.names), "converting", "tensor", progress) as line:
            file.write(header_bytes(entries, {"format": "pt"}))
            for name in self.names:
                for values in self.values(name, self.row_order(name)):
                    file.write(encode_floats(values, dtype))
                line.update()

    def row_order(self, name: str) -> np.ndarray | None:
        """The order that undoes the interleaving of q and k rows in a llama GGUF; None for other tensors."""
        kind = name.split(".")[-2]
        if self.arch != "llama" or kind not in ("attn_q", "attn_k"):
            return None
        heads = self.heads if kind == "attn_q" else self.kv_heads
        rows = self.tensors[name].shape[-1]
        if rows != heads * self.head_dim:
            self.refuse_tensor(name, f"has {rows} rows; expected {heads} x {self.head_dim}")
        order = np.arange(rows).reshape(heads, self.head_dim // 2, 2)
        return order.swapaxes(1, 2).ravel()

    def values(self, name: str, order: np.ndarray | None) -> Iterator[np.ndarray]:
        """The tensor's values as float32, a bounded number of rows at a time, rows in `order`.

        Gemma 3's norms multiply by 1 + weight; the file stores the sum.
        """
        tensor = self.tensors[name]
        plus_one = self.arch == "gemma3" and name.endswith("norm.weight")
        by_rows = len(tensor.shape) > 1 or order is not None
        data = tensor.rows(tensor.shape[-1] if by_rows else 1)
        step = max(1, CHUNK_VALUES * len(data) // math.prod(tensor.shape))
        for start in range(0, len(data), step):
            rows = data[start : start + step] if order is None else data[order[start : start + step]]
            values = self.widened(rows, tensor)
            yield values - np.float32(1) if plus_one else values

    def widened(self, rows: np.ndarray, tensor: GgufTensor) -> np.ndarray:
        """The float32 values of rows in any format."""
        if tensor.kind in FORMATS:
            return _core.widen(rows.tobytes(), tensor.kind)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            return dequantize(rows, GGMLQuantizationType[tensor.kind]).astype(np.float32, copy=False).ravel()
        except NotImplementedError:
            self.refuse_tensor(tensor.name, f"is {tensor.kind}, which gguf cannot read")


def shortest_float(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def encode_floats(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "f32":
        return values.tobytes()
    if dtype == "f16":
        return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded[np.isnan(values)] = 0x7FC0
    return rounded.astype(np.uint16).tobytes()
