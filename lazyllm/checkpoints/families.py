"""The model families that run, each a row of features, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
SCALINGS = {name: name for name in ("default", "linear", "llama3", "yarn", "longrope")}
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class Family:
    """The features of a model family, as a row of FAMILIES."""

    model_type: str

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that files may leave out."""
    multimodal: bool = False
    """The text model's fields are in the object `text_config`, whose `model_type` may name another row."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The field that names it, and the name."""
    qkv_bias: str | bool = False
    """q, k and v have biases, or the field of this name says whether."""
    o_bias: str | bool = False
    qk_norm: Literal["none", "heads", "wide", "late"] = "none"
    """Norms of q and k: none; of each head before RoPE; of all heads together; of each head behind RoPE."""
    norms: Literal["pre", "post", "both"] = "pre"
    """Before attention and FFN, behind them, or both."""
    norm_plus_one: bool = False
    scaled_embedding: bool = False
    query_scalar: str | None = None
    """The field whose root divides scores, in place of the head dimension's."""
    soft_caps: Mapping[str, float] | None = None
    """SOFT_CAPS of files that leave them out; null in a file is no cap. None: the family has none."""
    windows: Literal["none", "all", "all_if_used", "pattern", "optional"] = "none"
    """In all layers; in all if `use_sliding_window` is set; in those that `layer_types` or else
    `sliding_window_pattern` says; or, if `use_sliding_window` is set, in those that `layer_types` or else
    `max_window_layers` says."""
    theta: float = 10000.0
    """The base frequency of RoPE in files that leave it out."""
    local_theta: tuple[str, float] | None = None
    """The field and the default of another base frequency, in layers with a window."""
    scalings: Mapping[str, str] = field(default_factory=lambda: SCALINGS)
    """The rule that each type of scaling names."""
    partial_rope: bool = False
    """RoPE may turn the first part of a head alone."""
    paired_rope: bool = False
    """RoPE turns neighbours of a head, not its halves."""
    no_rope: Literal["none", "listed", "full", "full_if_mixed"] = "none"
    """Layers without RoPE: those that `no_rope_layers` or else `no_rope_layer_interval` says; those without a
    window; or those, but none where `sliding_window` is null."""
    ffn: str = "intermediate_size"
    """The field of the FFN's width."""
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """More of UNSUPPORTED."""
    attention_only: bool = False
    """`layer_types` must name attention in every layer."""
    multipliers: bool = False
    """Granite's."""
    cohere: bool = False
    """LayerNorm, attention and FFN in parallel, a factor on the logits; norms of q and k if `use_qk_norm` is
    set."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of tensors' names in files, in the order in which they become those that the core takes."""
    expert_ffn: str | None = None
    """The field of the size of each expert, in a family with experts."""


ALL_BIASES: Any = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
GEMMA3 = Family(
    "gemma3_text",
    defaults={  # of transformers' Gemma3TextConfig: files on the hub leave out fields that have them
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window_pattern": 6,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    **ALL_BIASES,
    qk_norm="heads",
    norms="both",
    norm_plus_one=True,
    scaled_embedding=True,
    query_scalar="query_pre_attn_scalar",
    soft_caps={},
    windows="pattern",
    theta=1e6,
    local_theta=("rope_local_base_freq", 1e4),
)
GEMMA2 = replace(
    GEMMA3,
    model_type="gemma2",
    defaults={  # of transformers' Gemma2Config
        **GEMMA3.defaults,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
    },
    qk_norm="none",
    soft_caps=dict(zip(SOFT_CAPS, (50.0, 30.0), strict=True)),
    theta=1e4,
    local_theta=None,
)
MISTRAL = Family("mistral", windows="all")
PHI3_SCALINGS = {"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
EPS = {"rms_norm_eps": 1e-5}
OLMO2 = Family("olmo2", EPS, **ALL_BIASES, qk_norm="wide", norms="post")
GRANITE = Family("granite", {"max_position_embeddings": 2048}, **ALL_BIASES, multipliers=True)
GLM = Family(
    "glm",
    {
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "rms_norm_eps": 1.5625e-07,
        "eos_token_id": [151329, 151336, 151338],
    },
    qkv_bias="attention_bias",
    paired_rope=True,
    partial_rope=True,
)
COHERE = Family(
    "cohere",
    {
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    **ALL_BIASES,
    theta=5e5,
    paired_rope=True,
    cohere=True,
)
FAMILIES = {
    "LlamaForCausalLM": Family("llama", {"max_position_embeddings": 2048}, **ALL_BIASES),
    "MistralForCausalLM": MISTRAL,
    "Mistral3ForConditionalGeneration": replace(MISTRAL, model_type="mistral3", multimodal=True),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, windows="optional"),
    "Qwen3ForCausalLM": Family("qwen3", {"head_dim": 128}, **ALL_BIASES, qk_norm="heads", windows="optional"),
    "Phi3ForCausalLM": Family(
        "phi3",
        EPS | {"sliding_window": None, "original_max_position_embeddings": 4096},
        windows="all",
        scalings=PHI3_SCALINGS,
        partial_rope=True,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {"sliding_window": None, "tie_word_embeddings": True},
        **ALL_BIASES,
        windows="optional",
        theta=2e6,
        no_rope="listed",
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        EPS | {"sliding_window": None, "head_dim": 128, "rope_parameters": MINISTRAL3_ROPE},
        windows="all",
    ),
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeHybridForCausalLM": replace(
        GRANITE,
        model_type="granitemoehybrid",
        defaults={**GRANITE.defaults, "num_local_experts": 8, "position_embedding_type": "none"},
        ffn="shared_intermediate_size",
        attention_only=True,
        only={
            "num_local_experts": (0, "mixtures of experts"),
            "position_embedding_type": ("rope", "layers without RoPE"),
        },
        renamed={
            "shared_mlp.input_linear": "mlp.gate_up_proj",
            "shared_mlp.output_linear": "mlp.down_proj",
        },
    ),
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": replace(
        OLMO2,
        model_type="olmo3",
        defaults=EPS | {"sliding_window_pattern": 4},
        windows="pattern",
        theta=5e5,
        local_theta=("rope_theta", 5e5),
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        EPS | {"sliding_window_pattern": 4},
        qk_norm="heads",
        norms="post",
        windows="pattern",
        no_rope="full_if_mixed",
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        {"head_dim": 128, "attention_bias": True},
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
    ),
    "MiMoForCausalLM": Family("mimo", qkv_bias=True, windows="optional"),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        EPS | {"head_dim": 128, "tie_word_embeddings": True},
        theta=5e5,
        paired_rope=True,
    ),
    "HeliumForCausalLM": Family(
        "helium",
        {"head_dim": 128, "rms_norm_eps": 1e-8},
        qkv_bias="attention_bias",
        theta=1e5,
        paired_rope=True,
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense",
        EPS,
        **ALL_BIASES,
        qk_norm="late",
        scalings=SCALINGS | {"dynamic": "alpha"},
        renamed={
            "self_attn.query_layernorm": "self_attn.q_norm",
            "self_attn.key_layernorm": "self_attn.k_norm",
        },
    ),
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": replace(
        GLM,
        model_type="glm4",
        norms="both",
        renamed={
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        {"sliding_window": None, "norm_topk_prob": True},
        windows="all",
        renamed={"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
        expert_ffn="intermediate_size",
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        **ALL_BIASES,
        qk_norm="heads",
        windows="all_if_used",
        expert_ffn="moe_intermediate_size",
    ),
    "OlmoeForCausalLM": Family("olmoe", EPS, **ALL_BIASES, qk_norm="wide", expert_ffn="intermediate_size"),
    "GraniteMoeForCausalLM": replace(
        GRANITE,
        model_type="granitemoe",
        defaults={**GRANITE.defaults, "norm_topk_prob": True},
        renamed={
            "block_sparse_moe.router.layer": "mlp.gate",
            "block_sparse_moe.input_linear": "mlp.experts.gate_up_proj",
            "block_sparse_moe.output_linear": "mlp.experts.down_proj",
        },
        expert_ffn="intermediate_size",
    ),
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": replace(
        COHERE,
        model_type="cohere2",
        defaults={**COHERE.defaults, "sliding_window_pattern": 4},
        windows="pattern",
        no_rope="full",
        theta=1e4,
    ),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": replace(GEMMA3, model_type="gemma3", multimodal=True),
}
BY_TYPE = {family.model_type: architecture for architecture, family in FAMILIES.items()}
RECURRENT = "it has recurrent layers, which cannot take a token later, so that revival has no meaning there"
ATTENTION = ["attention", FULL]
REFUSED = {
    **dict.fromkeys(("Mamba", "Jamba", "NemotronH", "Lfm2", "RecurrentGemma", "Rwkv"), RECURRENT),
    **dict.fromkeys(("Qwen3Next", "Qwen3_5", "FalconH1", "Zamba", "Bamba"), RECURRENT),
    **dict.fromkeys(
        ("DeepseekV2", "DeepseekV3", "KimiK2"), "its layers keep latents in place of keys and values"
    ),
    **dict.fromkeys(("Gemma3n", "Gemma4"), "its layers have embeddings of their own"),
}
"""Parts of architectures' names, and why they do not run."""
DEFAULT_WINDOW = 4096
UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "mlp_bias": (False, "biases in the MLP"),
    "use_bias": (False, "biases in the MLP"),
    "use_bidirectional_attention": (False, "passes that are not causal"),
    "clip_qkv": (None, "clipped queries, keys and values"),
    "quantization_config": (None, "quantized checkpoints (use one in bf16, f16 or f32)"),
    "compression_config": (None, "quantized checkpoints (use one in bf16, f16 or f32)"),
}
"""Fields with the only value that runs, and what others mean."""
