"""The shapes of well-known models, and checkpoints of these shapes with random bfloat16 weights."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DEVIATION = 0.02
BLOCK_VALUES = 1 << 20


@dataclass(frozen=True)
class ModelShape:
    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int  # of each expert, if there are any
    n_experts: int = 0
    experts_per_token: int = 0

    @property
    def matrices(self) -> dict[str, tuple[str, int, int]]:
        """The matrix products of a layer: (op, rows, cols)."""
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


def write_model(folder: Path, shape: ModelShape, vocab: int, context: int, empty: bool = False) -> None:
    """Writes a Llama, or with experts a Qwen3 MoE, of this shape in Hugging Face layout, without a tokenizer.

    `empty`: its weights are zeros that take no room on the disk.
    """
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    if shape.n_experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.n_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.ffn,
            "norm_topk_prob": True,
        }
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", tensor_shapes(shape, vocab), empty)


def tensor_shapes(shape: ModelShape, vocab: int) -> dict[str, tuple[int, ...]]:
    width, kv_width = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, shape.hidden)}
    for layer in range(shape.n_layers):
        parts = {
            "input_layernorm": (shape.hidden,),
            "self_attn.q_proj": (width, shape.hidden),
            "self_attn.k_proj": (kv_width, shape.hidden),
            "self_attn.v_proj": (kv_width, shape.hidden),
            "self_attn.o_proj": (shape.hidden, width),
            "post_attention_layernorm": (shape.hidden,),
        }
        if shape.n_experts:
            parts |= {"mlp.gate": (shape.n_experts, shape.hidden)}
            parts |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (shape.head_dim,))
        for ffn in [f"mlp.experts.{e}" for e in range(shape.n_experts)] or ["mlp"]:
            parts |= dict.fromkeys((f"{ffn}.gate_proj", f"{ffn}.up_proj"), (shape.ffn, shape.hidden))
            parts[f"{ffn}.down_proj"] = (shape.hidden, shape.ffn)
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in parts.items()}
    return shapes | {"model.norm.weight": (shape.hidden,)}


def write_weights(path: Path, tensors: dict[str, tuple[int, ...]], empty: bool) -> None:
    """Fills matrices with one block of random bfloat16 values, repeated, and norms with ones."""
    random = np.random.default_rng(0).normal(0, DEVIATION, BLOCK_VALUES).astype(np.float32)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if empty:
            file.truncate(file.tell() + end)
            return
        for shape in tensors.values():
            block = encoded(random if len(shape) > 1 else np.ones(shape, np.float32))
            whole, rest = divmod(2 * math.prod(shape), len(block))
            for _ in range(whole):
                file.write(block)
            file.write(block[:rest])


def encoded(values: np.ndarray) -> bytes:
    """float32 to bfloat16 by truncation, as bytes."""
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
