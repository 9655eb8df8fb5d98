"""ModelConfig: the shape of a model, read from config.json and checked; the families and their features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lazyllm.checkpoints.fields import Fields, optional_fields, read_json
from lazyllm.checkpoints.rope import FULL, LAYER_TYPES, MAX_CONTEXT, SLIDING, read_ropes

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 512
MAX_VOCAB = 1 << 24
MAX_QUERY_SCALAR = MAX_CAP = 1e6
DESCRIPTION = ("name", "architecture", "bos_token_id", "eos_token_ids")


@dataclass(frozen=True)
class Family:
    """The features of a model family, as a row of FAMILIES.

    `defaults` are the values of fields that files may leave out. With `multimodal`, the text model's fields
    are in the object `text_config`. `activation` is the field that names it, and the name. `biases`: q, k, v
    and o have them if the field attention_bias says so; or only q, k and v have them, always. `windows` are
    in all layers; in those that `layer_types` or else `sliding_window_pattern` says; or, if
    `use_sliding_window` is set, in those that `layer_types` or else `max_window_layers` says. `query_scalar`
    names the field whose root divides scores in place of the head dimension's. `soft_caps`: of attention and
    logits, in files that leave them out. `ropes`: see `read_ropes`.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    multimodal: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    biases: Literal["none", "attention_bias", "qkv"] = "none"
    qk_norm: bool = False
    post_norms: bool = False
    norm_plus_one: bool = False
    scaled_embedding: bool = False
    query_scalar: str | None = None
    soft_caps: tuple[float, float] = (0.0, 0.0)
    windows: Literal["none", "all", "pattern", "optional"] = "none"
    ropes: Mapping[str, tuple[str, float]] = field(default_factory=lambda: {FULL: ("rope_theta", 10000.0)})


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
    biases="attention_bias",
    qk_norm=True,
    post_norms=True,
    norm_plus_one=True,
    scaled_embedding=True,
    query_scalar="query_pre_attn_scalar",
    windows="pattern",
    ropes={FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)},
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
    qk_norm=False,
    soft_caps=(50.0, 30.0),
    ropes={FULL: ("rope_theta", 10000.0)},
)
FAMILIES = {
    "LlamaForCausalLM": Family("llama", {"max_position_embeddings": 2048}, biases="attention_bias"),
    "MistralForCausalLM": Family("mistral", windows="all"),
    "Qwen2ForCausalLM": Family("qwen2", biases="qkv", windows="optional"),
    "Qwen3ForCausalLM": Family(
        "qwen3", {"head_dim": 128}, biases="attention_bias", qk_norm=True, windows="optional"
    ),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": replace(GEMMA3, model_type="gemma3", multimodal=True),
}
DEFAULT_WINDOW = 4096
UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "mlp_bias": (False, "biases in the MLP"),
    "use_bidirectional_attention": (False, "passes that are not causal"),
    "quantization_config": (None, "quantized checkpoints (use one in bf16, f16 or f32)"),
    "compression_config": (None, "quantized checkpoints (use one in bf16, f16 or f32)"),
}
"""Fields with the only value that runs, and what others mean."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. `context` is the maximum length of a session.

    `windows` has the sliding window of each layer, 0 where the layer sees the whole context; `local_inv_freq`
    replaces `inv_freq` in the layers with a window. `paired_rope`: the weights of q and k have their rows in
    the order of RoPE's pairs, as in GGUF files of Llama.
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
    inv_freq: tuple[float, ...] = field(repr=False)
    rope_scale: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    paired_rope: bool
    windows: tuple[int, ...]
    local_inv_freq: tuple[float, ...] | None = field(repr=False)
    query_scalar: float
    attention_cap: float
    logit_cap: float
    embedding_scale: float
    norm_plus_one: bool
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
        family = FAMILIES[architecture]
        fields = with_defaults(fields, family)
        fields.only(*family.activation, "other activations")
        for name, (value, meaning) in UNSUPPORTED.items():
            fields.only(name, value, meaning)
        heads = fields.whole("num_attention_heads", MAX_WIDTH)
        kv_heads = fields.whole("num_key_value_heads", heads, default=heads)
        if heads % kv_heads:
            fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        hidden = fields.whole("hidden_size", MAX_WIDTH)
        head_dim = read_head_dim(fields, hidden, heads)
        ropes = read_ropes(
            fields, family.ropes, head_dim, fields.whole("max_position_embeddings", MAX_CONTEXT)
        )
        rope, local = ropes[FULL], ropes.get(SLIDING)
        windows = read_windows(fields, family, fields.whole("num_hidden_layers", MAX_LAYERS))
        if local is None:  # else a window also says which rope a layer has
            windows = tuple(window if window < rope.context else 0 for window in windows)
        attention_bias = family.biases == "attention_bias" and fields.flag("attention_bias", False)
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
            ffn=fields.whole("intermediate_size", MAX_WIDTH),
            vocab=vocab,
            context=rope.context,
            norm_eps=fields.number("rms_norm_eps", 0.0, 0.1, default=1e-6),
            inv_freq=rope.inv_freq,
            rope_scale=rope.scale,
            tied=fields.flag("tie_word_embeddings", False),
            qkv_bias=family.biases == "qkv" or attention_bias,
            o_bias=attention_bias,
            qk_norm=family.qk_norm,
            paired_rope=False,
            windows=windows,
            local_inv_freq=local.inv_freq if local and any(windows) else None,
            query_scalar=(
                fields.number(family.query_scalar, 0.0, MAX_QUERY_SCALAR) if family.query_scalar else head_dim
            ),
            attention_cap=read_cap(fields, "attn_logit_softcapping", family.soft_caps[0]),
            logit_cap=read_cap(fields, "final_logit_softcapping", family.soft_caps[1]),
            embedding_scale=float(np.float32(hidden**0.5)) if family.scaled_embedding else 1.0,
            norm_plus_one=family.norm_plus_one,
            post_norms=family.post_norms,
            gelu=family.activation[1] != "silu",
            bos_token_id=next(iter(read_ids(fields, "bos_token_id", vocab)), None),
            eos_token_ids=read_ids(generation, "eos_token_id", vocab),
        )

    def core(self) -> dict[str, Any]:
        """The fields that the C core takes."""
        fields = {name: value for name, value in asdict(self).items() if name not in DESCRIPTION}
        local = self.local_inv_freq
        return fields | {
            "inv_freq": np.array(self.inv_freq, np.float32),
            "local_inv_freq": None if local is None else np.array(local, np.float32),
            "windows": list(self.windows),
        }


def model_name(path: Path) -> str:
    """The folder's name; in the hub's cache (models--owner--name/snapshots/commit) the model's id."""
    place = path.resolve()
    if place.parent.name == "snapshots":
        return place.parent.parent.name.removeprefix("models--").replace("--", "/")
    return place.name


def read_architecture(fields: Fields) -> str:
    listed, model_type = fields.get("architectures"), fields.get("model_type")
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


def with_defaults(fields: Fields, family: Family) -> Fields:
    """The fields of the text model, with the family's defaults for those that are missing or null."""
    if family.multimodal:
        outer = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
        text = fields.section("text_config")
        if fields.get("text_config") is None:
            fields.refuse("text_config", "an object: the configuration of the text model")
        text.values = text.values | {
            name: fields.values[name] for name in outer if fields.get(name) is not None
        }
        fields = text
    missing = {name: value for name, value in family.defaults.items() if fields.get(name) is None}
    return Fields(fields.source, {"sliding_window": DEFAULT_WINDOW} | fields.values | missing, fields.names)


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


def read_windows(fields: Fields, family: Family, n_layers: int) -> tuple[int, ...]:
    """The sliding window of each layer; 0 where the layer sees the whole context."""
    optional, layer_types = family.windows == "optional", fields.get("layer_types")
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
    elif optional:
        first = fields.whole("max_window_layers", MAX_CONTEXT, default=28, low=0)
        sliding = [layer >= first for layer in range(n_layers)]
    else:
        pattern = fields.whole("sliding_window_pattern", MAX_LAYERS)
        sliding = [(layer + 1) % pattern != 0 for layer in range(n_layers)]
    if not any(sliding) or (fields.get("sliding_window") is None and SLIDING not in family.ropes):
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
