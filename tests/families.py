"""A small config.json for every supported model family, and the recorded results of transformers."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints import families
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.fields import Fields

RECORDED = Path(__file__).parent / "recorded"
PROMPT_TOKENS = 48
NEW_TOKENS = 16
DEMO_EVERY = 97  # every 97th logit of the demonstration model is recorded
PREFIXES = (1, 16, 31, 48)  # logits are recorded after this many tokens of the prompt


@dataclass(frozen=True)
class Family:
    """A recorded family. `oracle` is the model type by which transformers runs it where it lacks its own."""

    config: dict[str, Any]
    dtype: str
    shards: int
    oracle: str | None

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


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.5], "long_factor": [1.2, 2.5, 5.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

F16 = ("llama2", "phi4-mini", "qwen2.5", "gemma3-layers", "qwen3-moe-steps", "gemma2-caps", "cohere2")
F32 = ("xgen", "olmo2", "mixtral-window")
SHARDS = {"llama2": 3, "phi4-mini": 2, "mixtral": 2, "granite-moe": 2}
ORACLES = {"mimo": "qwen2"}


def recorded_family(folder: Path) -> Family:
    """The family with the folder's config.json, in the form used on the hub or the one of transformers 5."""
    config, name = json.loads((folder / "config.json").read_text(encoding="utf-8")), folder.name
    dtype = "F16" if name in F16 else "F32" if name in F32 else "BF16"
    return Family(config, dtype, SHARDS.get(name, 1), ORACLES.get(name))


FAMILIES = {folder.name: recorded_family(folder) for folder in sorted((RECORDED / "families").iterdir())}


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
            lists = {name: file[name].tolist() for name in ("prompt", "prefixes", "greedy")}
            return cls(logits=file["logits"], **lists)


def config_of(fields: dict[str, Any]) -> ModelConfig:
    """The configuration that config.json with these fields has."""
    return ModelConfig.read(Fields("config.json", fields))


def open_model(folder: Path, threads: int = 1) -> _core.Model:
    """Opens a Hugging Face folder with the engine."""
    checkpoint = Checkpoint(folder)
    return _core.Model(checkpoint.config.core(), checkpoint.shards, checkpoint.tensors, threads=threads)


def greedy_tokens(model: _core.Model, prompt: list[int], count: int) -> list[int]:
    session = model.session(None)
    sampler = _core.Sampler(0.0, 1.0, 0, 0)
    tokens = [session.advance(prompt, sampler)]
    while len(tokens) < count:
        tokens.append(session.advance(tokens[-1:], sampler, generated=True))
    return tokens
