"""ModelConfig: the shape of a model, read from config.json and checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.checkpoints.families import BY_TYPE, FAMILIES, FULL, LAYER_TYPES, SLIDING, SOFT_CAPS, Family
from lazyllm.checkpoints.fields import Fields, optional_fields, read_json
from lazyllm.checkpoints.rope import MAX_CONTEXT, NO_ROPE, read_ropes

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 512
MAX_VOCAB = 1 << 24
MAX_QUERY_SCALAR = MAX_CAP = 1e6
MAX_EXPERTS = 1024
SCALES = 1e-3, 1e3
RECURRENT = "it has recurrent layers, which cannot take a token later, so that revival has no meaning there"
ATTENTION = ["attention", FULL]
REFUSED = {
    "Mamba Jamba NemotronH Lfm2 RecurrentGemma Rwkv Qwen3Next Qwen3_5 FalconH1 Zamba Bamba": RECURRENT,
    "DeepseekV2 DeepseekV3 KimiK2": "its layers keep latents in place of keys and values",
    "Gemma3n Gemma4": "its layers have embeddings of their own",
}
"""Parts of architectures' names, and why they do not run."""
DESCRIPTION = ("name", "architecture", "eos_token_ids", "induction_head")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one model. `context` is the maximum length of a session.

    `windows` has the sliding window of each layer, 0 where the layer sees the whole context; `layer_rope` the
    row of `inv_freq` and `rope_scale` that it uses; in contexts longer than `short_context` it uses the next
    row. RoPE turns the first `rotary_dim` values of a head, with `paired_rope` the neighbours 2i and
    2i + 1, else i and i + rotary_dim / 2. q at position p is multiplied by
    1 + query_growth ln(1 + floor(p / query_step)). `expert_layers` has 1 for each layer with experts, 0 for
    the others, whose FFNs are `ffn` wide.
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
    paired_rope: bool = False
    query_growth: float
    query_step: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    late_qk_norm: bool = False
    windows: tuple[int, ...]
    query_scalar: float
    attention_cap: float
    logit_cap: float
    embedding_scale: float
    logit_scale: float
    norm_plus_one: bool = False
    layer_norm: bool = False
    pre_norms: bool
    parallel: bool = False
    post_norms: bool
    gelu: bool
    n_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    normed_experts: bool = False
    expert_layers: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    induction_head: tuple[int, int] | None = None  # (layer, head); in LLM.config_for alone, as weights tell

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """The configuration in config.json and generation_config.json of the folder."""
        fields = Fields(folder / "config.json", read_json(folder / "config.json"))
        return cls.read(fields, optional_fields(folder / "generation_config.json"), folder)

    @classmethod
    def read(cls, fields: Fields, generation: Fields | None = None, path: Path | None = None) -> ModelConfig:
        """The configuration in the fields of config.json and generation_config.json; `path` names the model."""
        architecture = read_architecture(fields)
        fields, family = text_fields(fields, FAMILIES[architecture])
        fields.only(*family.activation, "other activations")
        if family.attention_only:
            layers = fields.get("layer_types")
            if not isinstance(layers, list) or not layers or not all(kind in ATTENTION for kind in layers):
                fields.refuse("layer_types", f"layers of attention: {RECURRENT}")
        for name, (*value, meaning) in family.only.items():
            fields.only(name, value[0] if value else None, meaning)
        for name in sorted({*SOFT_CAPS} - {*family.scales}):
            fields.only(name, None, f"soft caps in a {family.model_type}")
        attention_cap, logit_cap = (fields.number(name, 0.0, MAX_CAP, default=0.0) for name in SOFT_CAPS)
        heads = fields.whole("num_attention_heads", MAX_WIDTH)
        kv_heads = fields.whole("num_key_value_heads", heads, default=heads)
        if heads % kv_heads:
            fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        hidden = fields.whole("hidden_size", MAX_WIDTH)
        head_dim = read_head_dim(fields, hidden, heads)
        windows, kinds = read_layers(fields, family, fields.whole("num_hidden_layers", MAX_LAYERS))
        ropes = read_ropes(fields, family, head_dim, kinds)

        def scale(name: str) -> float:
            return fields.number(name, *SCALES, default=1.0) if name in family.scales else 1.0

        residual, embedding = scale("residual_multiplier"), scale("embedding_multiplier")
        query_scalar = float(head_dim)
        if "attention_multiplier" in family.scales:
            query_scalar = scale("attention_multiplier") ** -2
        if family.query_scalar:
            query_scalar = fields.number(family.query_scalar, 0.0, MAX_QUERY_SCALAR)
        if family.scaled_embedding:
            embedding = float(np.float32(hidden**0.5))
        features: dict[str, Any] = {
            name: fields.flag(value, False) if isinstance(value, str) else value
            for name, value in family.features.items()
        }
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
            norm_eps=fields.number(family.eps, 0.0, 0.1, default=1e-6) / residual**2,
            **ropes,
            tied=fields.flag("tie_word_embeddings", False),
            windows=tuple(window if window < ropes["context"] else 0 for window in windows),
            query_scalar=query_scalar,
            attention_cap=attention_cap,
            logit_cap=logit_cap,
            embedding_scale=embedding / residual,
            logit_scale=scale("logit_scale") / scale("logits_scaling"),
            pre_norms=family.norms != "post",
            post_norms=family.norms != "pre",
            gelu=family.activation[1] != "silu",
            **features,
            **read_experts(fields, family.expert_ffn, len(windows)),
            eos_token_ids=read_end_ids(generation, vocab),
        )

    def core(self) -> dict[str, Any]:
        """The fields that the C core takes."""
        fields = {name: value for name, value in vars(self).items() if name not in DESCRIPTION}
        return fields | {"inv_freq": np.array(self.inv_freq, np.float32).ravel()}


def model_name(path: Path) -> str:
    """The folder's name; in the hub's cache (models--owner--name/snapshots/commit) the model's id."""
    place = path.resolve()
    if place.parent.name == "snapshots":
        return place.parent.parent.name.removeprefix("models--").replace("--", "/")
    return place.name


def read_architecture(fields: Fields) -> str:
    listed, model_type = fields.get("architectures"), fields.get("model_type")
    for parts, reason in REFUSED.items():
        if any(part in str(listed) for part in parts.split()):
            fields.refuse("architectures", f"another architecture: {reason}")
    if listed is None:
        return architecture_of_type(fields)
    if listed not in [[architecture] for architecture in FAMILIES]:
        fields.refuse("architectures", f"one of {', '.join(FAMILIES)}")
    architecture: str = listed[0]
    expected = FAMILIES[architecture].model_type
    if model_type not in (None, expected):
        fields.refuse("model_type", f"{expected!r}, the type of {architecture}")
    return architecture


def architecture_of_type(fields: Fields) -> str:
    model_type = fields.get("model_type")
    if model_type not in list(BY_TYPE):
        fields.refuse("model_type", f"one of {', '.join(BY_TYPE)}")
    return BY_TYPE[model_type]


def text_fields(fields: Fields, family: Family) -> tuple[Fields, Family]:
    """The fields of the text model, with its family's defaults for those that are missing or null."""
    if family.multimodal:
        outer = ("eos_token_id", "tie_word_embeddings", "quantization_config")
        if fields.get("text_config") is None:
            fields.refuse("text_config", "an object: the configuration of the text model")
        text = fields.section("text_config")
        shared = {name: value for name in outer if (value := fields.get(name)) is not None}
        text.values = {"model_type": family.model_type} | text.values | shared
        fields, family = text, FAMILIES[architecture_of_type(text)]
    missing = {name: value for name, value in family.defaults.items() if fields.get(name) is None}
    return Fields(fields.source, {**family.nullable, **fields.values, **missing}, fields.names), family


def read_head_dim(fields: Fields, hidden: int, heads: int) -> int:
    named = fields.get("head_dim") is not None
    head_dim = fields.whole("head_dim", MAX_HEAD_DIM, default=hidden // heads)
    if head_dim % 2 or (not named and hidden % heads):
        expected = f"an even {'number' if named else f'multiple of num_attention_heads ({heads})'}"
        fields.refuse("head_dim" if named else "hidden_size", f"{expected}: rotary embeddings turn pairs")
    if heads * head_dim > MAX_WIDTH:
        fields.refuse("num_attention_heads", f"at most {MAX_WIDTH} values in all heads")
    return head_dim


def read_layers(fields: Fields, family: Family, n_layers: int) -> tuple[tuple[int, ...], list[str]]:
    """The sliding window of each layer, 0 where it sees the whole context, and the name of its rope."""
    has_rope = read_turns(fields, n_layers) if family.no_rope == "listed" else [True] * n_layers
    sliding = read_sliding(fields, family, has_rope)
    needed = family.local_theta or family.no_rope == "full"
    has_window = any(sliding) and (needed or fields.get("sliding_window") is not None)
    window = fields.whole("sliding_window", MAX_CONTEXT) if has_window else 0
    windows = tuple(window if slides else 0 for slides in sliding)
    if family.no_rope == "full" or (family.no_rope == "full_if_mixed" and fields.get("sliding_window") is not None):
        has_rope = [window > 0 for window in windows]
    local = SLIDING if family.local_theta else FULL
    kinds = [local if window else FULL for window in windows]
    return windows, [kind if rope else NO_ROPE for kind, rope in zip(kinds, has_rope, strict=True)]


def read_turns(fields: Fields, n_layers: int) -> list[bool]:
    """By layer, True if it has RoPE. `no_rope_layers`, despite its name, has 1 for a layer with RoPE."""
    listed = fields.get("no_rope_layers")
    if listed is None:
        interval = fields.whole("no_rope_layer_interval", MAX_CONTEXT, default=4)
        return [(layer + 1) % interval != 0 for layer in range(n_layers)]
    if not isinstance(listed, list) or len(listed) != n_layers or not set(map(repr, listed)) <= {"0", "1"}:
        fields.refuse("no_rope_layers", f"a list of {n_layers} numbers: 1 for a layer with RoPE, else 0")
    return [entry == 1 for entry in listed]


def read_sliding(fields: Fields, family: Family, has_rope: list[bool]) -> list[bool]:
    """By layer, True if it has a sliding window."""
    layer_types, n_layers = fields.get("layer_types"), len(has_rope)
    if_used = family.windows in ("optional", "all_if_used")
    if family.windows == "none" or (if_used and not fields.flag("use_sliding_window", False)):
        return [False] * n_layers
    if family.windows in ("all", "all_if_used"):
        return [True] * n_layers
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != n_layers:
            fields.refuse("layer_types", f"a list of {n_layers} layer types")
        if unknown := [kind for kind in layer_types if kind not in LAYER_TYPES]:
            fields.refuse("layer_types", f"{' and '.join(LAYER_TYPES)} only, not {unknown[0]!r}")
        return [kind == SLIDING for kind in layer_types]
    if family.no_rope == "listed":
        return [not rope for rope in has_rope]
    if family.windows == "optional":
        first = fields.whole("max_window_layers", MAX_CONTEXT, default=28, low=0)
        return [layer >= first for layer in range(n_layers)]
    pattern = fields.whole("sliding_window_pattern", MAX_LAYERS)
    return [(layer + 1) % pattern != 0 for layer in range(n_layers)]


def read_experts(fields: Fields, ffn: str | None, n_layers: int) -> dict[str, Any]:
    """The fields of ModelConfig about experts; `ffn` names the field of their size, None without experts."""
    if ffn is None:
        return {"expert_layers": (0,) * n_layers}
    named = fields.get("num_local_experts") is not None  # transformers' name; some files have the other
    count = fields.whole("num_local_experts" if named else "num_experts", MAX_EXPERTS)
    step = fields.whole("decoder_sparse_step", MAX_LAYERS, default=1)
    plain = fields.get("mlp_only_layers", [])
    if not isinstance(plain, list) or any(type(layer) is not int for layer in plain):
        fields.refuse("mlp_only_layers", "a list of layers")
    has_experts = ((layer + 1) % step == 0 and layer not in plain for layer in range(n_layers))
    return {
        "n_experts": count,
        "experts_per_token": fields.whole("num_experts_per_tok", count),
        "expert_ffn": fields.whole(ffn, MAX_WIDTH),
        "normed_experts": fields.flag("norm_topk_prob", False),
        "expert_layers": tuple(map(int, has_experts)),
    }


def read_end_ids(fields: Fields, vocab: int) -> tuple[int, ...]:
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            fields.refuse("eos_token_id", f"token ids below vocab_size ({vocab})")
    return tuple(dict.fromkeys(ids))
