"""Tiny random models: a configuration, its exact weights and a real safetensors file, all from one seed."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import header_bytes, read_shard
from lazyllm.checkpoints.tensors import Tensor
from lazyllm.machine.device import libraries

# "cuda" runs the same tests on a CUDA device, with f32 weights only: in 16 bits it is less exact than the CPU
DEVICE = os.environ.get("LAZYLLM_TEST_DEVICE", "cpu")
SANITIZED = bool(os.environ.get("LAZYLLM_SANITIZED"))
DTYPES = ["F32", "BF16", "F16"] if DEVICE == "cpu" else ["F32"]


def fewer_if_sanitized(tokens: int) -> int:
    """A core built with sanitizers is about ten times slower: an eighth of the tokens take it as long."""
    return tokens // 8 if SANITIZED else tokens


@dataclass(frozen=True)
class Shape:
    """The dimensions, options and seed of a tiny model; equal shapes give equal models."""

    seed: int = 0
    n_layers: int = 4
    hidden: int = 32
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 40
    vocab: int = 97
    context: int = 512
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    late_qk_norm: bool = False
    rope_scale: float = 1.0
    rotary_dim: int | None = None  # None: head_dim
    paired_rope: bool = False
    short_context: int | None = None  # in longer contexts the frequencies are halved; None: in none
    no_rope: tuple[bool, ...] = (False,)  # of the layers in turn: they have no RoPE
    query_growth: float = 0.0
    query_step: int = 16
    windows: tuple[int, ...] = (0,)  # of the layers in turn, from the first again after the last; 0: none
    local_theta: float | None = None  # base of the RoPE of layers with a window
    query_scalar: float | None = None  # None: head_dim
    attention_cap: float = 0.0  # 0: none
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    norm_plus_one: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    layer_norm: bool = False
    parallel: bool = False
    gelu: bool = False
    n_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    normed_experts: bool = False
    expert_layers: tuple[int, ...] = (0,)  # in turn, as the windows; 1: the layer has experts
    dtype: str = "F32"

    @property
    def dimensions(self) -> dict[str, int]:
        """The dimensions by their names in config.json."""
        experts = {
            "num_experts": self.n_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_ffn,
        }
        return (experts if self.n_experts else {}) | {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
        }


@dataclass(frozen=True)
class Tiny:
    """A model on disk, with its config, its weights in float32 and its table of tensors."""

    shape: Shape
    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    path: Path
    tensors: list[Tensor]

    def load(self, threads: int = 1, **options: str) -> _core.Model:
        files, options = [str(self.path)], {"device": DEVICE} | options
        model = _core.Model(self.config, files, self.tensors, threads=threads, libraries=libraries(), **options)
        model.know_words(self.config["word_parts"])
        return model

    def ids(self, count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, self.shape.vocab, count).tolist()


def pruning(stages: Any = (), **options: Any) -> dict[str, Any]:
    """Pruning options in the form that the core takes; options that are not given have their defaults."""
    defaults = {"stages": list(stages), "decode": "same", "sink": 0, "window": 0, "protect": [], "layers": 1}
    defaults |= {"queries": 1, "pooling": "mean", "head": None, "smooth": 1, "words": False, "memory": 0.0, "gain": 1.0}
    defaults |= {"revival": 1.0, "average": False, "min_tokens": 0, "prune_generated": False, "policy": None}
    assert set(options) <= set(defaults)
    return {**defaults, **options}


Build = Callable[[Shape], Tiny]


def build(shape: Shape, folder: Path, changed: dict[str, np.ndarray] | None = None) -> Tiny:
    """Writes the model of `shape` to `folder`, with the tensors in `changed` replaced."""
    weights = random_weights(shape) | (changed or {})
    stored = {name: encode(array, shape.dtype) for name, array in weights.items()}
    path = folder / f"{len(list(folder.iterdir()))}.safetensors"
    tensors = write_safetensors(path, stored, shape.dtype)
    exact = {name: decode(array, shape.dtype) for name, array in stored.items()}
    return Tiny(shape, make_config(shape), exact, path, tensors)


def make_config(shape: Shape) -> dict[str, Any]:
    rotary_dim = shape.rotary_dim or shape.head_dim
    pair = np.arange(0, rotary_dim, 2, dtype=np.float64)
    layers = range(shape.n_layers)
    windows = in_turn(shape.windows, shape.n_layers)

    def inv_freq(theta: float) -> np.ndarray:
        frequencies = np.zeros(shape.head_dim // 2, np.float32)
        frequencies[: len(pair)] = theta ** (-pair / rotary_dim)
        return frequencies

    # of layers without RoPE, of layers with a window, of the others; each with its form for long contexts
    ropes = [(inv_freq(10000.0) * 0, 1.0), (inv_freq(10000.0), shape.rope_scale)]
    ropes.insert(1, (inv_freq(shape.local_theta), 1.0) if shape.local_theta else ropes[-1])
    which = [0 if shape.no_rope[layer % len(shape.no_rope)] else 1 if windows[layer] else 2 for layer in layers]
    used = sorted(set(which))
    forms = (1.0, 0.5) if shape.short_context else (1.0,)
    return vars(shape) | {
        "norm_eps": 1e-5,
        "inv_freq": np.concatenate([ropes[rope][0] * np.float32(form) for rope in used for form in forms]),
        "rope_scale": [ropes[rope][1] for rope in used for _ in forms],
        "layer_rope": [len(forms) * used.index(rope) for rope in which],
        "short_context": shape.short_context or shape.context,
        "rotary_dim": rotary_dim,
        "windows": windows,
        "expert_layers": in_turn(shape.expert_layers, shape.n_layers),
        "query_scalar": float(shape.query_scalar or shape.head_dim),
        "word_parts": bytes((3, 3, 1, 3, 3, 2, 3, 0)[token % 8] for token in range(shape.vocab)),  # not the core's
    }


def in_turn(values: tuple[int, ...], n_layers: int) -> list[int]:
    return [values[layer % len(values)] for layer in range(n_layers)]


def random_weights(shape: Shape) -> dict[str, np.ndarray]:
    """Random weights that give uneven attention: its logits have a standard deviation of about 2."""
    rng = np.random.default_rng(shape.seed)
    q_rows, kv_rows = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return rng.normal(0.0, gain / np.sqrt(columns), (rows, columns))

    def norm(size: int, gain: float = 1.0) -> np.ndarray:
        return gain * rng.normal(1.0, 0.1, size) - shape.norm_plus_one

    weights = {"model.embed_tokens.weight": rng.normal(0.0, 1.0, (shape.vocab, shape.hidden))}
    for layer in range(shape.n_layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        if shape.pre_norms:
            weights[prefix + "input_layernorm.weight"] = norm(shape.hidden)
        if not shape.parallel:
            weights[prefix + "post_attention_layernorm.weight"] = norm(shape.hidden)
        if shape.post_norms:
            if shape.pre_norms:
                weights[prefix + "pre_feedforward_layernorm.weight"] = norm(shape.hidden)
            weights[prefix + "post_feedforward_layernorm.weight"] = norm(shape.hidden)
        weights[attention + "q_proj.weight"] = matrix(q_rows, shape.hidden, 1.4)
        weights[attention + "k_proj.weight"] = matrix(kv_rows, shape.hidden, 1.4)
        weights[attention + "v_proj.weight"] = matrix(kv_rows, shape.hidden)
        weights[attention + "o_proj.weight"] = matrix(shape.hidden, q_rows)
        ffns, width = [mlp], shape.ffn
        if in_turn(shape.expert_layers, shape.n_layers)[layer]:
            weights[mlp + "gate.weight"] = matrix(shape.n_experts, shape.hidden)
            ffns, width = [f"{mlp}experts.{e}." for e in range(shape.n_experts)], shape.expert_ffn
        for ffn in ffns:
            weights[ffn + "gate_proj.weight"] = matrix(width, shape.hidden)
            weights[ffn + "up_proj.weight"] = matrix(width, shape.hidden)
            weights[ffn + "down_proj.weight"] = matrix(shape.hidden, width)
        if shape.qkv_bias:
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                weights[attention + f"{name}_proj.bias"] = rng.normal(0.0, 0.3, rows)
        if shape.o_bias:
            weights[attention + "o_proj.bias"] = rng.normal(0.0, 0.3, shape.hidden)
        if shape.qk_norm:
            for name, rows in (("q", q_rows), ("k", kv_rows)):
                size = rows if shape.wide_qk_norm or shape.layer_norm else shape.head_dim
                places = (-1, shape.head_dim) if shape.layer_norm else (-1,)
                weights[attention + f"{name}_norm.weight"] = norm(size, 1.4).reshape(places)
    weights["model.norm.weight"] = norm(shape.hidden)
    if not shape.tied:
        weights["lm_head.weight"] = matrix(shape.vocab, shape.hidden)
    return weights


def encode(array: np.ndarray, dtype: str) -> np.ndarray:
    """The stored form of `array`; bfloat16, which NumPy lacks, as its 16 bits, rounded to nearest even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return np.ascontiguousarray(array, {"F32": "<f4", "F16": "<f2"}[dtype])


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def write_safetensors(path: Path, stored: dict[str, np.ndarray], dtype: str) -> list[Tensor]:
    """Writes the file; returns the core's table."""
    header = header_bytes({name: (dtype, array.shape, array.nbytes) for name, array in stored.items()}, {})
    path.write_bytes(header + b"".join(array.tobytes() for array in stored.values()))
    return read_shard(path, 0)


def shared_bytes() -> int:
    """Bytes of this process's files in memory, mapped or not."""
    folder = Path("/proc/self/fd")
    links = [folder / name for name in os.listdir(folder)]
    files = [link for link in links if link.is_symlink() and "memfd:lazyllm" in os.readlink(link)]
    return sum(512 * link.stat().st_blocks for link in files)
