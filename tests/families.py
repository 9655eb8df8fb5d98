"""A small config.json for every supported model family, and the recorded results of transformers."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.checkpoints import families
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.fields import Fields

if TYPE_CHECKING:
    from lazyllm import _core

RECORDED = Path(__file__).parent / "recorded"
PROMPT_TOKENS = 48
NEW_TOKENS = 16
DEMO_EVERY = 97  # every 97th logit of the demonstration model is recorded
PREFIXES = (1, 16, 31, 48)  # logits are recorded after this many tokens of the prompt


@dataclass(frozen=True)
class Family:
    """A config in the form used on the hub, or, with `as_saved`, in the form that transformers 5 writes."""

    config: dict[str, Any]
    dtype: str = "BF16"
    shards: int = 1
    as_saved: bool = False
    oracle: str | None = None  # the model type by which transformers runs it, where it lacks the family's own

    @property
    def oracle_config(self) -> dict[str, Any]:
        fields = {"pad_token_id": 0} | copy.deepcopy(self.config)  # defaults lie beyond tiny vocabularies
        return fields | {"model_type": self.oracle} if self.oracle else fields


def family_config(architecture: str, **fields: Any) -> dict[str, Any]:
    """A tiny model's config.json; `fields` replaces defaults, and None removes a field."""
    model_type = families.FAMILIES[architecture].model_type
    shape: dict[str, Any] = {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu"}
    shape |= {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128}
    shape |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
    shape |= {"bos_token_id": 1, "eos_token_id": 2}
    if architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        shape |= {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 8}
    if architecture in ("MixtralForCausalLM", "GraniteMoeForCausalLM"):
        shape |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    if architecture in ("Qwen3MoeForCausalLM", "OlmoeForCausalLM"):
        shape |= {"num_experts": 6, "num_experts_per_tok": 3}
    if architecture == "Qwen3MoeForCausalLM":
        shape["moe_intermediate_size"] = 24
    return {name: value for name, value in (shape | fields).items() if value is not None}


def as_saved(name: str, dtype: str = "BF16", **fields: Any) -> Family:
    """The family of the architecture `name`ForCausalLM with these fields in its config."""
    return Family(family_config(f"{name}ForCausalLM", **fields), dtype, as_saved=True)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.5], "long_factor": [1.2, 2.5, 5.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

STORED: dict[str, dict[str, Any]] = {"llama2": {"dtype": "F16", "shards": 3}, "mimo": {"oracle": "qwen2"}}
STORED |= {"phi4-mini": {"dtype": "F16", "shards": 2}, "mixtral": {"shards": 2}, "granite-moe": {"shards": 2}}
STORED |= {"qwen2.5": {"dtype": "F16"}, "xgen": {"dtype": "F32"}, "olmo2": {"dtype": "F32"}}


def on_hub(folder: Path) -> Family:
    """The family with the folder's config.json; one shard of BF16 weights, unless STORED says more."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Family(config, **STORED.get(folder.name, {}))


FAMILIES = {folder.name: on_hub(folder) for folder in sorted(RECORDED.joinpath("families").iterdir())} | {
    "llama3": as_saved("Llama", rope_theta=500000.0, rope_scaling=LLAMA3),
    "qwen3": as_saved("Qwen3", rope_theta=1e6, head_dim=16, tie_word_embeddings=True),
    "gemma3-layers": as_saved(
        "Gemma3",
        dtype="F16",
        **{"num_hidden_layers": 4, "query_pre_attn_scalar": 24, "attention_bias": True},
        **{"sliding_window": 10},
        **{"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        **{"rope_local_base_freq": 500.0},
    ),
    "ernie4.5": as_saved("Ernie4_5", head_dim=12, use_bias=False, rope_theta=5e5),
    "glm4": as_saved("Glm4", head_dim=8, partial_rotary_factor=0.5, attention_bias=True),
    "mixtral-window": as_saved(
        "Mixtral",
        dtype="F32",
        **{"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 9, "head_dim": 12},
        **{"num_hidden_layers": 2, "intermediate_size": 16},
    ),
    "qwen3-moe-steps": as_saved(
        "Qwen3Moe",
        dtype="F16",
        **{"num_hidden_layers": 6, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 6},
        **{"num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 2},
        **{"mlp_only_layers": [3], "use_sliding_window": True, "sliding_window": 8},
        **{"max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "gemma2-caps": as_saved(
        "Gemma2",
        dtype="F16",
        **{"head_dim": 20, "num_key_value_heads": 1, "attention_bias": True},
        **{"query_pre_attn_scalar": 24, "sliding_window": 5},
        **{"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        **{"attn_logit_softcapping": 2.0},
    ),
    "cohere2": as_saved(
        "Cohere2",
        dtype="F16",
        **{"rms_norm_eps": None, "num_hidden_layers": 5, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "logit_scale": 0.25, "sliding_window": 7},
        **{"sliding_window_pattern": 3},
    ),
}


@dataclass(frozen=True)
class Expected:
    """Results of transformers in float32: logits after each prefix of the prompt, then greedy tokens."""

    prompt: list[int]
    prefixes: list[int]
    logits: np.ndarray  # (prefix, vocab)
    greedy: list[int]

    def save(self, path: Path) -> None:
        np.savez_compressed(path, **vars(self))

    @classmethod
    def load(cls, path: Path) -> Expected:
        with np.load(path, allow_pickle=False) as file:
            prompt, prefixes, greedy = (file[name].tolist() for name in ("prompt", "prefixes", "greedy"))
            return cls(prompt, prefixes, file["logits"], greedy)


def config_of(fields: dict[str, Any]) -> ModelConfig:
    """The configuration that config.json with these fields has."""
    return ModelConfig.read(Fields("config.json", fields))


def open_model(folder: Path, threads: int = 1) -> _core.Model:
    """Opens a Hugging Face folder with the engine."""
    from lazyllm import _core
    from lazyllm.checkpoints.checkpoint import Checkpoint

    checkpoint = Checkpoint(folder)
    return _core.Model(checkpoint.config.core(), checkpoint.shards, checkpoint.tensors, threads=threads)


def greedy_tokens(model: _core.Model, prompt: list[int], count: int) -> list[int]:
    from lazyllm import _core

    session = model.session(None)
    sampler = _core.Sampler(0.0, 1.0, 0, 0)
    tokens = [session.advance(prompt, sampler)]
    while len(tokens) < count:
        tokens.append(session.advance(tokens[-1:], sampler, generated=True))
    return tokens
