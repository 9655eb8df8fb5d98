"""A model in one GGUF file: what it says, in the terms of a folder in Hugging Face layout."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import Checkpoint, core_tensors
from lazyllm.checkpoints.config import MAX_HEAD_DIM, MAX_WIDTH, SOFT_CAPS, ModelConfig
from lazyllm.checkpoints.families import FAMILIES
from lazyllm.checkpoints.fields import Fields
from lazyllm.checkpoints.gguf_file import FORMATS, read_gguf
from lazyllm.checkpoints.gguf_tokenizer import GgufVocabulary
from lazyllm.checkpoints.rope import FULL, MAX_THETA, SLIDING, frequency_divisors, llama3
from lazyllm.checkpoints.tensors import Tensor, experts_apart, hub_name
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.errors import CheckpointError
from lazyllm.support.files import OpenedFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "glm4": "Glm4ForCausalLM",
}
PAIRED = ("llama", "smollm3", "granite")
"""Architectures whose files have the rows of q and k by RoPE's pairs, unlike those of Hugging Face."""
FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Fields of config.json, which all architectures have, in the metadata of a GGUF file."""
WINDOW = {"sliding_window": "attention.sliding_window"}
PATTERN = "attention.sliding_window_pattern"
FAMILY_FIELDS = {
    "gemma2": WINDOW | {"sliding_window_pattern": PATTERN},
    "gemma3": WINDOW | {"rope_local_base_freq": "rope.freq_base_swa", "sliding_window_pattern": PATTERN},
    "phi3": WINDOW | {"original_max_position_embeddings": "rope.scaling.original_context_length"},
    "granite": {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    "olmo2": WINDOW,
    "exaone4": WINDOW,
}
EXPERT_FIELDS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ROPE_FIELDS = {
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GATE_AND_UP = {"ffn_up": "mlp.gate_up_proj"}
FAMILY_TENSORS = {
    **dict.fromkeys(("gemma2", "gemma3"), BEHIND | {"ffn_norm": "pre_feedforward_layernorm"}),
    "phi3": GATE_AND_UP | {"attn_qkv": "self_attn.qkv_proj"},
    "olmo2": BEHIND,
    "exaone4": BEHIND,
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "hunyuan-dense": {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
    "glm4": GATE_AND_UP
    | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
}
"""Where they differ from LAYER_TENSORS."""
LAYER_TENSOR = re.compile(r"blk\.(?P<layer>[0-9]{1,9})\.(?P<kind>\w+)\.(?P<suffix>weight|bias)")
EMBEDDING, ROPE_DIVISORS = "token_embd.weight", "rope_freqs.weight"
LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
LLAMA31_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufCheckpoint(Checkpoint):
    """Like `Checkpoint`, from a GGUF file in place of a folder; its tensors have Hugging Face's names.

    `config_json` and `generation_config` are the contents of the files that a folder would have, and
    `named_tensors` its tensors. Unlike what these say, Gemma's norms have 1 added, and with `is_paired` the
    rows of q and k lie by RoPE's pairs.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metadata, tensors = read_gguf(self.path)
        self.shards = [str(self.path)]
        self.shard_files = self.tokenizer_files = [OpenedFile(self.path)]
        self.config_files = []
        self.arch = str(self.metadata.get("general.architecture"))
        if self.arch not in ARCHITECTURES:
            raise CheckpointError(
                f"{path}: general.architecture is {self.arch!r}; supported are {', '.join(ARCHITECTURES)}"
            )
        self.gemma = self.arch in LAYERS_OF_27B
        self.stored = {tensor.name: tensor for tensor in tensors}
        self.architecture = ARCHITECTURES[self.arch]
        if self.arch == "llama" and self.field("expert_count"):
            self.architecture = "MixtralForCausalLM"
        if self.arch == "olmo2" and self.field(WINDOW["sliding_window"]):
            self.architecture = "Olmo3ForCausalLM"
        self.layer_tensors = LAYER_TENSORS | FAMILY_TENSORS.get(self.arch, {})
        self.is_paired = self.arch in PAIRED
        named = [
            tensor._replace(name=self.hugging_face_name(tensor.name))
            for tensor in tensors
            if tensor.name not in (ROPE_DIVISORS, *LONGROPE.values())
        ]
        self.named_tensors = [
            tensor._replace(name=hub_name(tensor.name, self.architecture)) for tensor in experts_apart(named)
        ]
        fields = FIELDS | FAMILY_FIELDS.get(self.arch, {}) | ROPE_FIELDS | EXPERT_FIELDS
        fields |= dict(zip(SOFT_CAPS, SOFT_CAPS, strict=True))
        self.names = {name: f"{self.arch}.{key}" for name, key in fields.items()}
        self.config_json, self.generation_config = self.read_config(), self.read_generation_config()
        config = ModelConfig.read(
            Fields(self.path, self.config_json, self.names), Fields(self.path, self.generation_config)
        )
        paired_rope = self.is_paired or config.paired_rope
        self.config = replace(config, name=self.path.stem, norm_plus_one=False, paired_rope=paired_rope)
        self.tensors = list(core_tensors(self.named_tensors, self.config, self.path))

    @cached_property
    def vocabulary(self) -> GgufVocabulary | None:
        described = "tokenizer.ggml.model" in self.metadata
        return GgufVocabulary(self.path, self.metadata) if described else None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_gguf(self.vocabulary, self.config) if self.vocabulary else None

    def widened(self, data: bytes, dtype: str) -> np.ndarray:
        """The values in float32, those of formats that the core lacks by the gguf package."""
        if dtype in FORMATS:
            return _core.widen(data, dtype)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            return dequantize(np.frombuffer(data, np.uint8), GGMLQuantizationType[dtype]).astype(np.float32)
        except NotImplementedError:
            raise CheckpointError(f"{self.path} has weights in {dtype}, which gguf cannot read") from None

    def values_of(self, tensor: Tensor) -> np.ndarray:
        return self.widened(b"".join(self.chunks(tensor)), tensor.dtype)

    def hugging_face_name(self, name: str) -> str:
        part = LAYER_TENSOR.fullmatch(name)
        if name in TOP_TENSORS:
            return TOP_TENSORS[name]
        if part and part["kind"] in self.layer_tensors:
            return f"model.layers.{int(part['layer'])}.{self.layer_tensors[part['kind']]}.{part['suffix']}"
        self.refuse_tensor(name, f"has no place in a {self.architecture} model")

    def refuse_tensor(self, name: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: tensor {name!r} {problem}")

    def field(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.arch}.{key}")
        return default if value is None else shortest(value)

    def read_config(self) -> dict[str, Any]:
        """The contents of config.json; where a field is missing, it has the value that llama.cpp assumes."""
        embedding = self.stored.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            self.refuse_tensor(EMBEDDING, "is missing or no matrix")
        values = {name: self.field(key) for name, key in FIELDS.items()}
        values["vocab_size"] = embedding.shape[0]
        fields = Fields(self.path, values, self.names)
        heads, hidden = fields.whole("num_attention_heads", MAX_WIDTH), fields.whole("hidden_size", MAX_WIDTH)
        values["num_key_value_heads"] = fields.get("num_key_value_heads", heads)
        values["head_dim"] = fields.whole("head_dim", MAX_HEAD_DIM, default=hidden // heads)
        values["rope_theta"] = fields.number("rope_theta", 1.0, MAX_THETA, default=10000.0)
        for name in [name for name, value in values.items() if value is None]:
            fields.refuse(name, "a value: every GGUF file has it")
        family, partial = FAMILIES[self.architecture], {}
        if family.rope.partial:
            turned = Fields(self.path, self.metadata).whole(
                f"{self.arch}.rope.dimension_count", values["head_dim"], default=values["head_dim"]
            )
            values["partial_rotary_factor"] = turned / values["head_dim"]
        else:
            partial = {"rope.dimension_count": (values["head_dim"], "partial rotary embeddings")}
        others = {} if family.experts else {"expert_count": (0, "mixtures of experts")}
        for key, (value, meaning) in (partial | others).items():
            Fields(self.path, self.metadata).only(f"{self.arch}.{key}", value, meaning)
        if family.experts:
            experts = {name: self.field(key) for name, key in EXPERT_FIELDS.items()}
            values |= {name: value for name, value in experts.items() if value is not None}
            values["norm_topk_prob"] = self.arch == "qwen3moe"
        config = {
            "architectures": [self.architecture],
            "model_type": family.model_type,
            **values,
            "tie_word_embeddings": "output.weight" not in self.stored,
            "torch_dtype": "float32",
            **self.special_ids(),
            **self.soft_caps(),
            **(self.gemma_config(values) if self.gemma else self.family_config()),
        }
        if scaling := self.rope_scaling(values):
            config["rope_scaling"] = scaling
        for field, tensor in ((family.o_bias, "attn_output"), (family.qkv_bias, "attn_q")):
            if isinstance(field, str):
                config[field] = f"blk.0.{tensor}.bias" in self.stored
        return config

    def family_config(self) -> dict[str, Any]:
        """The fields that only some families have."""
        config = {name: self.field(key) for name, key in FAMILY_FIELDS.get(self.arch, {}).items()}
        config["sliding_window"] = config.get("sliding_window") or None  # 0: none
        if isinstance(pattern := self.field(PATTERN), list):
            config["layer_types"] = [SLIDING if slides else FULL for slides in pattern]
        return {"hidden_act": "silu"} | config

    def soft_caps(self) -> dict[str, Any]:
        defaults = FAMILIES[self.architecture].soft_caps or (0.0, 0.0)
        caps = {name: self.field(name, cap) for name, cap in zip(SOFT_CAPS, defaults, strict=True)}
        return {name: cap for name, cap in caps.items() if cap}

    def gemma_config(self, values: dict[str, Any]) -> dict[str, Any]:
        """The fields that only Gemma 2 and 3 have."""
        is_27b = values["num_hidden_layers"] == LAYERS_OF_27B[self.arch]
        local_rope = {"rope_local_base_freq": self.field("rope.freq_base_swa", 10000.0)}
        window, pattern, local_rope = (4096, 2, {}) if self.arch == "gemma2" else (None, 6, local_rope)
        sliding = {"sliding_window": self.field("attention.sliding_window", window)}
        sliding["sliding_window_pattern"] = self.field("attention.sliding_window_pattern", pattern)
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": (
                values["hidden_size"] // values["num_attention_heads"] if is_27b else values["head_dim"]
            ),
            **local_rope,
            **(sliding if sliding["sliding_window"] else {"sliding_window_pattern": 1}),
        }

    def special_ids(self) -> dict[str, Any]:
        return {
            f"{name}_token_id": self.metadata.get(f"tokenizer.ggml.{name}_token_id")
            for name in ("bos", "eos")
        }

    def read_generation_config(self) -> dict[str, Any]:
        """The contents of generation_config.json: an answer ends at the end of a turn, too."""
        ids = self.special_ids()
        end, turn_end = ids["eos_token_id"], self.metadata.get("tokenizer.ggml.eot_token_id")
        if turn_end not in (None, end):
            ids["eos_token_id"] = turn_end if end is None else [end, turn_end]
        return ids

    def rope_scaling(self, values: dict[str, Any]) -> dict[str, Any] | None:
        if ROPE_DIVISORS in self.stored:
            return self.llama3_scaling(values["rope_theta"], values["head_dim"])
        if set(LONGROPE.values()) <= set(self.stored):
            factors = {name: self.values_of(self.stored[tensor]) for name, tensor in LONGROPE.items()}
            return {"rope_type": "longrope"} | {
                name: [shortest(float(factor)) for factor in values] for name, values in factors.items()
            }
        if self.field("rope.scaling.type", "none") == "none":
            return None
        scaling = {name: self.field(key) for name, key in ROPE_FIELDS.items()}
        return {name: value for name, value in scaling.items() if value is not None}

    def llama3_scaling(self, theta: float, head_dim: int) -> dict[str, Any]:
        """Recovers Llama 3.1's scaling rule, which a GGUF file stores as one divisor per frequency."""
        tensor = self.stored[ROPE_DIVISORS]
        divisors = self.values_of(tensor)
        scaling = {"rope_type": "llama3", "factor": shortest(float(divisors.max())), **LLAMA31_ROPE}
        plain = 1 / frequency_divisors(theta, head_dim)
        original = LLAMA31_ROPE["original_max_position_embeddings"]
        expected = plain / llama3(plain, Fields(self.path, scaling), int(original))
        if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
            self.refuse_tensor(ROPE_DIVISORS, f"does not follow Llama 3.1's rule ({LLAMA31_ROPE})")
        return scaling


def shortest(value: Any) -> Any:
    """The shortest decimal that rounds to a float of the file: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, or in a GGUF file."""
    return GgufCheckpoint(path) if path.is_file() else Checkpoint(path)
