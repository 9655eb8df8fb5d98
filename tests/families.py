"""A small config.json for every supported model family, and the recorded results of transformers."""

from __future__ import annotations

import copy
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


def family(
    name: str,
    dtype: str = "BF16",
    shards: int = 1,
    as_saved: bool = False,
    oracle: str | None = None,
    **fields: Any,
) -> Family:
    """The family of the architecture `name`ForCausalLM with these fields in its config."""
    return Family(family_config(f"{name}ForCausalLM", **fields), dtype, shards, as_saved, oracle)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.5], "long_factor": [1.2, 2.5, 5.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

FAMILIES = {
    "llama1": family("Llama", num_key_value_heads=4, rms_norm_eps=1e-6),
    "llama2": family("Llama", dtype="F16", shards=3),
    "llama3": family("Llama", as_saved=True, rope_theta=500000.0, rope_scaling=LLAMA3),
    "llama-linear": family("Llama", rope_scaling={"type": "linear", "factor": 4.0}),
    "llama-yarn": family("Llama", rope_scaling=YARN),
    "llama-bias": family("Llama", attention_bias=True),
    "xgen": family("Llama", dtype="F32", num_key_value_heads=None, num_hidden_layers=2),
    "mistral": family("Mistral", sliding_window=9, head_dim=12),
    "qwen2": family("Qwen2", rope_theta=1e6, use_sliding_window=False, sliding_window=16),
    "qwen2.5": family("Qwen2", dtype="F16", rope_theta=1e6, tie_word_embeddings=True),
    "qwen3": family("Qwen3", as_saved=True, rope_theta=1e6, head_dim=16, tie_word_embeddings=True),
    "smollm2": family(
        "Llama",
        **{"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1},
        **{"intermediate_size": 44, "rope_theta": 100000.0, "tie_word_embeddings": True},
    ),
    "qwen2-window": family(
        "Qwen2", rope_theta=1e6, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "gemma3": family(
        "Gemma3",
        **{"num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 16},
        **{"query_pre_attn_scalar": 16, "sliding_window": 7, "sliding_window_pattern": 3},
        **{"rope_theta": 1e6, "rope_local_base_freq": 10000.0},
        **{"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "tie_word_embeddings": True},
    ),
    "gemma3-layers": family(
        "Gemma3",
        dtype="F16",
        as_saved=True,
        **{"num_hidden_layers": 4, "query_pre_attn_scalar": 24, "attention_bias": True},
        **{"sliding_window": 10},
        **{"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        **{"rope_local_base_freq": 500.0},
    ),
    "phi3": family("Phi3", sliding_window=9),
    "phi4-mini": family(  # its short context is one of PREFIXES
        "Phi3",
        dtype="F16",
        shards=2,
        **{"partial_rotary_factor": 0.75, "original_max_position_embeddings": 16},
        **{"rope_scaling": LONGROPE, "tie_word_embeddings": True},
    ),
    "smollm3": family(
        "SmolLM3", num_hidden_layers=4, use_sliding_window=False, rope_theta=5e6, tie_word_embeddings=True
    ),
    "smollm3-layers": family(
        "SmolLM3",
        **{"no_rope_layers": [1, 0, 0]},
        **{"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        **{"use_sliding_window": True, "sliding_window": 9, "rope_scaling": YARN},
    ),
    "ministral3": family(
        "Ministral3",
        head_dim=12,
        rope_theta=None,
        rope_parameters=YARN
        | {"rope_theta": 1e6, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
    ),
    "granite": family(
        "Granite",
        **{"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.22},
        **{"logits_scaling": 8.0, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "granite4": family(
        "GraniteMoeHybrid",
        **{"intermediate_size": 7, "shared_intermediate_size": 40, "num_local_experts": 0},
        **{"layer_types": 3 * ["attention"], "position_embedding_type": "rope"},
        **{"embedding_multiplier": 6.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4},
        **{"logits_scaling": 4.0, "mamba_n_heads": 1},
    ),
    "olmo2": family("Olmo2", dtype="F32", rope_theta=5e5),
    "olmo3": family("Olmo3", num_hidden_layers=4, sliding_window=7, rope_theta=5e5, rope_scaling=YARN),
    "exaone4": family(
        "Exaone4",
        **{"num_hidden_layers": 4, "head_dim": 12, "sliding_window": 7, "sliding_window_pattern": 4},
        **{"rope_theta": 1e6},
    ),
    "exaone4-global": Family(
        family_config("Exaone4ForCausalLM", layer_types=3 * ["full_attention"], rope_scaling=LLAMA3)
        | {"sliding_window": None}
    ),
    "seed-oss": family("SeedOss", head_dim=12, attention_bias=True, attention_out_bias=False),
    "mimo": family("MiMo", oracle="qwen2", head_dim=12, rope_theta=640000.0),
    "ernie4.5": family("Ernie4_5", as_saved=True, head_dim=12, use_bias=False, rope_theta=5e5),
    "helium": family("Helium", head_dim=8, rope_theta=1e5, rms_norm_eps=1e-8),
    "hunyuan": family(
        "HunYuanDenseV1",
        head_dim=12,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        tie_word_embeddings=True,
    ),
    "glm": family("Glm", head_dim=12, partial_rotary_factor=0.5),
    "glm4": family("Glm4", as_saved=True, head_dim=8, partial_rotary_factor=0.5, attention_bias=True),
    "mixtral": family("Mixtral", shards=2, num_local_experts=4, num_experts_per_tok=2, intermediate_size=24),
    "mixtral-window": family(
        "Mixtral",
        dtype="F32",
        as_saved=True,
        **{"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 9, "head_dim": 12},
        **{"num_hidden_layers": 2, "intermediate_size": 16},
    ),
    "qwen3-moe": family(
        "Qwen3Moe",
        **{"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3},
        **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3-moe-steps": family(
        "Qwen3Moe",
        dtype="F16",
        as_saved=True,
        **{"num_hidden_layers": 6, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 6},
        **{"num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 2},
        **{"mlp_only_layers": [3], "use_sliding_window": True, "sliding_window": 8},
        **{"max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "olmoe": family("Olmoe", intermediate_size=16, num_experts=8, norm_topk_prob=False),
    "granite-moe": family(
        "GraniteMoe",
        shards=2,
        **{"intermediate_size": 16, "embedding_multiplier": 12.0, "attention_multiplier": 0.25},
        **{"residual_multiplier": 0.22, "logits_scaling": 6.0, "tie_word_embeddings": True},
    ),
    "gemma2": family(
        "Gemma2",
        **{"num_hidden_layers": 4, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 9},
        **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "tie_word_embeddings": True},
    ),
    "gemma2-caps": family(
        "Gemma2",
        dtype="F16",
        as_saved=True,
        **{"head_dim": 20, "num_key_value_heads": 1, "attention_bias": True},
        **{"query_pre_attn_scalar": 24, "sliding_window": 5},
        **{"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        **{"attn_logit_softcapping": 2.0},
    ),
    "cohere": family(
        "Cohere",
        **{"rms_norm_eps": None, "layer_norm_eps": 1e-4, "logit_scale": 0.5, "attention_bias": True},
        **{"use_qk_norm": True, "tie_word_embeddings": True, "rope_theta": 8e6},
    ),
    "cohere2": family(
        "Cohere2",
        dtype="F16",
        as_saved=True,
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
