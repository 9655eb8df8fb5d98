"""ModelConfig: the shape of a model, read from config.json and checked; the families and their features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lazyllm.checkpoints.fields import Fields, optional_fields, read_json
from lazyllm.checkpoints.rope import (
    FULL,
    LAYER_TYPES,
    MAX_CONTEXT,
    NO_ROPE,
    SCALINGS,
    SLIDING,
    RopeRules,
    read_ropes,
    rope_table,
)

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 512
MAX_VOCAB = 1 << 24
MAX_QUERY_SCALAR = MAX_CAP = 1e6
MULTIPLIERS = 1e-3, 1e3
DESCRIPTION = ("name", "architecture", "bos_token_id", "eos_token_ids")


@dataclass(frozen=True)
class Family:
    """The features of a model family, as a row of FAMILIES.

    `defaults` are the values of fields that files may leave out. With `multimodal`, the text model's fields
    are in the object `text_config`; its `model_type` may name another family's row. `activation` is the
    field that names it, and the name. `qkv_bias` and `o_bias`: q, k and v, and o, have biases if the field
    of this name says so; or they always have. `qk_norm`: of each head of q and k before RoPE; of all heads
    together; of each head behind RoPE. `norms`: before attention and FFN, behind them, or both. `windows`
    are in all layers; in those that `layer_types` or else `sliding_window_pattern` says; or, if
    `use_sliding_window` is set, in those that `layer_types` or else `max_window_layers` says. `no_rope`: in
    layers without RoPE, those that `no_rope_layers` or else `no_rope_layer_interval` says; or, in a model
    with windows, those without one. `query_scalar` names the field whose root divides scores in place of
    the head dimension's. `ffn` names the FFN's width. `attention_only`: `layer_types` may name others.
    `only`: more of UNSUPPORTED. `paired_rope`: RoPE turns neighbours of a head, not its halves.
    `soft_caps`: of attention and
    logits, in files that leave them out. `cohere`: LayerNorm, attention and FFN in parallel, a factor on the
    logits, norms of q and k if `use_qk_norm` says so.
    `multipliers`: Granite's. `query_growth`: q grows with the position, as `llama_4_scaling_beta` says.
    `renamed` has the parts of tensors' names in files that differ from those that the core takes.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    multimodal: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    qkv_bias: str | bool = False
    o_bias: str | bool = False
    qk_norm: Literal["none", "heads", "wide", "late"] = "none"
    norms: Literal["pre", "post", "both"] = "pre"
    norm_plus_one: bool = False
    scaled_embedding: bool = False
    query_scalar: str | None = None
    soft_caps: tuple[float, float] = (0.0, 0.0)
    windows: Literal["none", "all", "pattern", "optional"] = "none"
    rope: RopeRules = field(default_factory=RopeRules)
    paired_rope: bool = False
    no_rope: Literal["none", "listed", "full"] = "none"
    ffn: str = "intermediate_size"
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    attention_only: bool = False
    multipliers: bool = False
    cohere: bool = False
    query_growth: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)


def based_on(theta: float) -> RopeRules:
    """RoPE with this base frequency where the file has none."""
    return RopeRules({FULL: ("rope_theta", theta)})


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
    windows="pattern",
    rope=RopeRules({FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}),
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
    soft_caps=(50.0, 30.0),
    rope=based_on(1e4),
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
    rope=RopeRules(partial=True),
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
    rope=based_on(5e5),
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
        rope=RopeRules(scalings=PHI3_SCALINGS, partial=True),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {"sliding_window": None, "tie_word_embeddings": True},
        **ALL_BIASES,
        windows="optional",
        rope=based_on(2e6),
        no_rope="listed",
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        EPS | {"sliding_window": None, "head_dim": 128, "rope_parameters": MINISTRAL3_ROPE},
        windows="all",
        query_growth=True,
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
        rope=RopeRules({FULL: ("rope_theta", 5e5), SLIDING: ("rope_theta", 5e5)}),
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        EPS | {"sliding_window_pattern": 4},
        qk_norm="heads",
        norms="post",
        windows="pattern",
        no_rope="full",
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
        rope=based_on(5e5),
        paired_rope=True,
    ),
    "HeliumForCausalLM": Family(
        "helium",
        {"head_dim": 128, "rms_norm_eps": 1e-8},
        qkv_bias="attention_bias",
        rope=based_on(1e5),
        paired_rope=True,
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense",
        EPS,
        **ALL_BIASES,
        qk_norm="late",
        rope=RopeRules(scalings=SCALINGS | {"dynamic": "alpha"}),
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
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
    ),
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": replace(
        COHERE,
        model_type="cohere2",
        defaults={**COHERE.defaults, "sliding_window_pattern": 4},
        windows="pattern",
        no_rope="full",
        rope=based_on(1e4),
    ),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": replace(GEMMA3, model_type="gemma3", multimodal=True),
}
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
    "quantization_config": (None, "quantized checkpoints (use one in bf16, f16 or f32)"),
    "compression_config": (None, "quantized checkpoints (use one in bf16, f16 or f32)"),
}
"""Fields with the only value that runs, and what others mean."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. `context` is the maximum length of a session.

    `windows` has the sliding window of each layer, 0 where the layer sees the whole context; `layer_rope` the
    row of `inv_freq` and `rope_scale` by which it turns, or in contexts longer than `short_context` the row
    after it. RoPE turns the first `rotary_dim` values of a head, with `paired_rope` the neighbours 2i and
    2i + 1, else i and i + rotary_dim / 2. q at position p is multiplied by
    1 + query_growth ln(1 + floor(p / query_step)).
    """

    name: str
    architecture: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    norm_eps: float
    inv_freq: tuple[tuple[float, ...], ...] = field(repr=False)
    rope_scale: tuple[float, ...]
    layer_rope: tuple[int, ...]
    short_context: int
    rotary_dim: int
    paired_rope: bool
    query_growth: float
    query_step: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    wide_qk_norm: bool
    late_qk_norm: bool
    windows: tuple[int, ...]
    query_scalar: float
    attention_cap: float
    logit_cap: float
    embedding_scale: float
    logit_scale: float
    norm_plus_one: bool
    layer_norm: bool
    pre_norms: bool
    parallel: bool
    post_norms: bool
    gelu: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, path: str | Path, generation: Fields | None = None) -> ModelConfig:
        """Reads config.json and, unless its fields are given, generation_config.json in the folder `path`."""
        folder = Path(path)
        fields = Fields(folder / "config.json", read_json(folder / "config.json"))
        return cls.read(fields, generation or optional_fields(folder / "generation_config.json"), folder)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelConfig:
        """Reads the contents of config.json."""
        return cls.read(Fields("config.json", config))

    @classmethod
    def read(cls, fields: Fields, generation: Fields | None = None, path: Path | None = None) -> ModelConfig:
        """Reads the fields of config.json and generation_config.json; `path` gives the model its name."""
        architecture = read_architecture(fields)
        fields, family = text_fields(fields, FAMILIES[architecture])
        fields.only(*family.activation, "other activations")
        if family.attention_only:
            layers = fields.get("layer_types")
            if not isinstance(layers, list) or not layers or not all(kind in ATTENTION for kind in layers):
                fields.refuse("layer_types", f"layers of attention: {RECURRENT}")
        for name, (value, meaning) in {**UNSUPPORTED, **family.only}.items():
            fields.only(name, value, meaning)
        heads = fields.whole("num_attention_heads", MAX_WIDTH)
        kv_heads = fields.whole("num_key_value_heads", heads, default=heads)
        if heads % kv_heads:
            fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        hidden = fields.whole("hidden_size", MAX_WIDTH)
        head_dim = read_head_dim(fields, hidden, heads)
        context = fields.whole("max_position_embeddings", MAX_CONTEXT)
        ropes = read_ropes(fields, family.rope, head_dim, context)
        context = ropes[FULL].context
        windows, kinds = read_layers(fields, family, fields.whole("num_hidden_layers", MAX_LAYERS))
        table = rope_table({kind: ropes[kind] for kind in sorted(set(kinds))})

        def multiplier(name: str) -> float:
            return fields.number(name, *MULTIPLIERS, default=1.0) if family.multipliers else 1.0

        residual, query_scalar = multiplier("residual_multiplier"), float(head_dim)
        embedding = multiplier("embedding_multiplier")
        if family.multipliers:
            query_scalar = multiplier("attention_multiplier") ** -2
        if family.query_scalar:
            query_scalar = fields.number(family.query_scalar, 0.0, MAX_QUERY_SCALAR)
        if family.scaled_embedding:
            embedding = float(np.float32(hidden**0.5))
        eps_name, logit_scale = "rms_norm_eps", 1 / multiplier("logits_scaling")
        if family.cohere:
            eps_name, logit_scale = "layer_norm_eps", fields.number("logit_scale", *MULTIPLIERS)
        vocab = fields.whole("vocab_size", MAX_VOCAB)
        if generation is None or generation.get("eos_token_id") is None:
            generation = fields
        return cls(
            name=model_name(path) if path else "",
            architecture=architecture,
            n_layers=len(windows),
            hidden=hidden,
            n_heads=heads,
            n_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=fields.whole(family.ffn, MAX_WIDTH),
            vocab=vocab,
            context=context,
            norm_eps=fields.number(eps_name, 0.0, 0.1, default=1e-6) / residual**2,
            inv_freq=tuple(rope.inv_freq for _, rope in table),
            rope_scale=tuple(rope.scale for _, rope in table),
            layer_rope=tuple([kind for kind, _ in table].index(kind) for kind in kinds),
            short_context=min(ropes[kind].short_context for kind in kinds),
            rotary_dim=ropes[FULL].rotary_dim,
            paired_rope=family.paired_rope,
            query_growth=ropes[FULL].query_growth if family.query_growth else 0.0,
            query_step=ropes[FULL].original,
            tied=fields.flag("tie_word_embeddings", False),
            qkv_bias=read_bias(fields, family.qkv_bias),
            o_bias=read_bias(fields, family.o_bias),
            qk_norm=family.qk_norm != "none" or (family.cohere and fields.flag("use_qk_norm", False)),
            wide_qk_norm=family.qk_norm == "wide",
            late_qk_norm=family.qk_norm == "late",
            windows=tuple(window if window < context else 0 for window in windows),
            query_scalar=query_scalar,
            attention_cap=read_cap(fields, "attn_logit_softcapping", family.soft_caps[0]),
            logit_cap=read_cap(fields, "final_logit_softcapping", family.soft_caps[1]),
            embedding_scale=embedding / residual,
            logit_scale=logit_scale,
            norm_plus_one=family.norm_plus_one,
            layer_norm=family.cohere,
            pre_norms=family.norms != "post",
            parallel=family.cohere,
            post_norms=family.norms != "pre",
            gelu=family.activation[1] != "silu",
            bos_token_id=next(iter(read_ids(fields, "bos_token_id", vocab)), None),
            eos_token_ids=read_ids(generation, "eos_token_id", vocab),
        )

    def core(self) -> dict[str, Any]:
        """The fields that the C core takes."""
        fields = {name: value for name, value in asdict(self).items() if name not in DESCRIPTION}
        arrays = {name: np.array(fields[name], np.float32).ravel() for name in ("inv_freq", "rope_scale")}
        return fields | arrays | {name: list(fields[name]) for name in ("layer_rope", "windows")}


def model_name(path: Path) -> str:
    """The folder's name; in the hub's cache (models--owner--name/snapshots/commit) the model's id."""
    place = path.resolve()
    if place.parent.name == "snapshots":
        return place.parent.parent.name.removeprefix("models--").replace("--", "/")
    return place.name


def read_architecture(fields: Fields) -> str:
    listed, model_type = fields.get("architectures"), fields.get("model_type")
    for name in listed if isinstance(listed, list) else ():
        for part, reason in REFUSED.items():
            if isinstance(name, str) and part in name:
                fields.refuse("architectures", f"another architecture: {reason}")
    if listed is None:
        by_type = {family.model_type: architecture for architecture, family in FAMILIES.items()}
        if model_type not in list(by_type):
            fields.refuse("model_type", f"one of {', '.join(by_type)}, or architectures naming one")
        return by_type[model_type]
    if listed not in [[architecture] for architecture in FAMILIES]:
        fields.refuse("architectures", f"one of {', '.join(FAMILIES)}")
    architecture: str = listed[0]
    expected = FAMILIES[architecture].model_type
    if model_type not in (None, expected):
        fields.refuse("model_type", f"{expected!r}, the type of {architecture}")
    return architecture


def text_fields(fields: Fields, family: Family) -> tuple[Fields, Family]:
    """The fields of the text model, with its family's defaults for those that are missing or null."""
    if family.multimodal:
        outer = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
        text = fields.section("text_config")
        if fields.get("text_config") is None:
            fields.refuse("text_config", "an object: the configuration of the text model")
        text.values = text.values | {
            name: fields.values[name] for name in outer if fields.get(name) is not None
        }
        fields, by_type = text, {family.model_type: family for family in FAMILIES.values()}
        if fields.get("model_type") is not None:
            if fields.get("model_type") not in list(by_type):
                fields.refuse("model_type", f"one of {', '.join(by_type)}")
            family = by_type[fields.get("model_type")]
    missing = {name: value for name, value in family.defaults.items() if fields.get(name) is None}
    values = {"sliding_window": DEFAULT_WINDOW} | fields.values | missing
    return Fields(fields.source, values, fields.names), family


def read_bias(fields: Fields, bias: str | bool) -> bool:
    return fields.flag(bias, False) if isinstance(bias, str) else bias


def read_head_dim(fields: Fields, hidden: int, heads: int) -> int:
    named = fields.get("head_dim") is not None
    head_dim = fields.whole("head_dim", MAX_HEAD_DIM, default=hidden // heads)
    if head_dim % 2 or (not named and hidden % heads):
        expected = f"an even {'number' if named else f'multiple of num_attention_heads ({heads})'}"
        fields.refuse("head_dim" if named else "hidden_size", f"{expected}: rotary embeddings turn pairs")
    if heads * head_dim > MAX_WIDTH:
        fields.refuse(
            "num_attention_heads", f"at most {MAX_WIDTH} values in all heads of dimension {head_dim}"
        )
    return head_dim


def read_cap(fields: Fields, name: str, default: float) -> float:
    """A soft cap; 0 where there is none, which a file may say by null."""
    if fields.get(name) is None:
        return 0.0 if name in fields.values else default
    return fields.number(name, 0.0, MAX_CAP)


def read_layers(fields: Fields, family: Family, n_layers: int) -> tuple[tuple[int, ...], list[str]]:
    """The sliding window of each layer, 0 where it sees the whole context, and the name of its rope."""
    turns = read_turns(fields, n_layers) if family.no_rope == "listed" else [True] * n_layers
    windows = read_windows(fields, family, turns)
    if family.no_rope == "full" and fields.get("sliding_window") is not None:
        turns = [window > 0 for window in windows]
    local = SLIDING if SLIDING in family.rope.bases else FULL
    kinds = [local if window else FULL for window in windows]
    return windows, [kind if turn else NO_ROPE for kind, turn in zip(kinds, turns, strict=True)]


def read_turns(fields: Fields, n_layers: int) -> list[bool]:
    """Whether each layer has RoPE, which the field with the opposite name says."""
    listed = fields.get("no_rope_layers")
    if listed is None:
        interval = fields.whole("no_rope_layer_interval", MAX_CONTEXT, default=4)
        return [(layer + 1) % interval != 0 for layer in range(n_layers)]
    if not isinstance(listed, list) or len(listed) != n_layers or not set(map(repr, listed)) <= {"0", "1"}:
        fields.refuse("no_rope_layers", f"a list of {n_layers} numbers: 1 for a layer with RoPE, else 0")
    return [entry == 1 for entry in listed]


def read_windows(fields: Fields, family: Family, turns: list[bool]) -> tuple[int, ...]:
    """The sliding window of each layer; 0 where the layer sees the whole context."""
    optional, layer_types, n_layers = family.windows == "optional", fields.get("layer_types"), len(turns)
    if family.windows == "none" or (optional and not fields.flag("use_sliding_window", False)):
        sliding = [False] * n_layers
    elif family.windows == "all":
        sliding = [True] * n_layers
    elif layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != n_layers:
            fields.refuse("layer_types", f"a list of {n_layers} layer types")
        if unknown := [kind for kind in layer_types if kind not in LAYER_TYPES]:
            fields.refuse("layer_types", f"{' and '.join(LAYER_TYPES)} only, not {unknown[0]!r}")
        sliding = [kind == SLIDING for kind in layer_types]
    elif family.no_rope == "listed":
        sliding = [not turn for turn in turns]
    elif optional:
        first = fields.whole("max_window_layers", MAX_CONTEXT, default=28, low=0)
        sliding = [layer >= first for layer in range(n_layers)]
    else:
        pattern = fields.whole("sliding_window_pattern", MAX_LAYERS)
        sliding = [(layer + 1) % pattern != 0 for layer in range(n_layers)]
    if not any(sliding) or (fields.get("sliding_window") is None and SLIDING not in family.rope.bases):
        return (0,) * n_layers
    window = fields.whole("sliding_window", MAX_CONTEXT)
    return tuple(window if slides else 0 for slides in sliding)


def read_ids(fields: Fields, name: str, vocab: int) -> tuple[int, ...]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            fields.refuse(name, f"token ids below vocab_size ({vocab})")
    return tuple(dict.fromkeys(ids))
