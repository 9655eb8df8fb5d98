"""ModelConfig: the shape of a model, read from config.json and checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.checkpoints.fields import Fields, read_json
from lazyllm.checkpoints.rope import MAX_CONTEXT, read_rope, read_rope_by_layer_type

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 512
MAX_VOCAB = 1 << 24
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}
MULTIMODAL = "Gemma3ForConditionalGeneration"
GEMMA3 = ("Gemma3ForCausalLM", MULTIMODAL)
# defaults of transformers' Gemma3TextConfig: files on the hub leave out fields that have them
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
LLAMA_CONTEXT = 2048
DEFAULT_WINDOW = 4096
QWEN3_HEAD_DIM = 128
MAX_QUERY_SCALAR = 1e6
LAYER_TYPES = ("full_attention", "sliding_attention")
DESCRIPTION = ("name", "architecture", "bos_token_id", "eos_token_ids")


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
    embedding_scale: float
    norm_plus_one: bool
    post_norms: bool
    gelu: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Reads config.json and, where it exists, generation_config.json in the folder `path`."""
        folder = Path(path)
        generation = folder / "generation_config.json"
        return cls.from_dict(
            read_json(folder / "config.json"),
            read_json(generation) if generation.exists() else {},
            folder=folder,
        )

    @classmethod
    def from_dict(
        cls,
        config: dict[str, Any],
        generation: dict[str, Any] | None = None,
        folder: str | Path = "",
        source: str | Path | None = None,
    ) -> ModelConfig:
        """Reads the contents of config.json and generation_config.json; errors name `folder`, or `source`
        where both come from one file."""
        fields = Fields(source or Path(folder) / "config.json", config)
        architecture = read_architecture(fields)
        gemma = architecture in GEMMA3
        if gemma:
            fields = gemma3_fields(fields, architecture)
        refuse_unsupported(fields, architecture)
        heads = fields.whole("num_attention_heads", MAX_WIDTH)
        kv_heads = fields.whole("num_key_value_heads", heads, default=heads)
        if heads % kv_heads:
            fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        hidden = fields.whole("hidden_size", MAX_WIDTH)
        head_dim = read_head_dim(fields, architecture, hidden, heads)
        longest = LLAMA_CONTEXT if architecture == "LlamaForCausalLM" else None
        context = fields.whole("max_position_embeddings", MAX_CONTEXT, default=longest)
        windows = read_windows(
            fields, architecture, n_layers := fields.whole("num_hidden_layers", MAX_LAYERS)
        )
        local_inv_freq = None
        if gemma:
            rope, local = read_rope_by_layer_type(fields, head_dim, context)
            local_inv_freq = local.inv_freq if any(windows) else None
        else:
            rope = read_rope(fields, head_dim, context)
            windows = tuple(window if window < rope.context else 0 for window in windows)
        attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM", *GEMMA3) and fields.flag(
            "attention_bias", False
        )
        vocab = fields.whole("vocab_size", MAX_VOCAB)
        eos_source = Fields(source or Path(folder) / "generation_config.json", generation or {})
        if eos_source.get("eos_token_id") is None:
            eos_source = fields
        return cls(
            name=model_name(Path(folder)) if folder else "",
            architecture=architecture,
            n_layers=n_layers,
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
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=attention_bias,
            qk_norm=architecture == "Qwen3ForCausalLM" or gemma,
            paired_rope=False,
            windows=windows,
            local_inv_freq=local_inv_freq,
            query_scalar=fields.number("query_pre_attn_scalar", 0.0, MAX_QUERY_SCALAR) if gemma else head_dim,
            embedding_scale=float(np.float32(hidden**0.5)) if gemma else 1.0,
            norm_plus_one=gemma,
            post_norms=gemma,
            gelu=gemma,
            bos_token_id=next(iter(read_ids(fields, "bos_token_id", vocab)), None),
            eos_token_ids=read_ids(eos_source, "eos_token_id", vocab),
        )

    def core(self) -> dict[str, Any]:
        """The fields that the C core takes."""
        fields = asdict(self)
        for name in DESCRIPTION:
            del fields[name]
        local = self.local_inv_freq
        return fields | {
            "inv_freq": np.array(self.inv_freq, np.float32),
            "local_inv_freq": None if local is None else np.array(local, np.float32),
            "windows": list(self.windows),
        }


def model_name(folder: Path) -> str:
    """The folder's name; in the hub's cache (models--owner--name/snapshots/commit) the model's id."""
    place = folder.resolve()
    if place.parent.name == "snapshots":
        return place.parent.parent.name.removeprefix("models--").replace("--", "/")
    return place.name


def read_architecture(fields: Fields) -> str:
    listed = fields.get("architectures")
    by_type = {model_type: name for name, model_type in MODEL_TYPES.items()}
    if listed is None:
        if fields.get("model_type") not in list(by_type):
            fields.refuse("model_type", f"one of {', '.join(by_type)}, or architectures naming one")
        return by_type[fields.text("model_type")]
    if not isinstance(listed, list) or listed not in [[name] for name in MODEL_TYPES]:
        fields.refuse("architectures", f"one of {', '.join(MODEL_TYPES)}")
    architecture: str = listed[0]
    if fields.get("model_type", MODEL_TYPES[architecture]) != MODEL_TYPES[architecture]:
        fields.refuse("model_type", f"{MODEL_TYPES[architecture]!r}, the type of {architecture}")
    return architecture


def gemma3_fields(fields: Fields, architecture: str) -> Fields:
    """The fields of Gemma 3's text model, with defaults; a multimodal config has them in `text_config`."""
    values = dict(fields.values)
    if architecture == MULTIMODAL:
        outer = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
        text = fields.object("text_config")
        if text is None:
            fields.refuse("text_config", "an object: the configuration of the text model")
        values = text | {name: fields.values[name] for name in outer if fields.get(name) is not None}
    missing = {name: value for name, value in GEMMA3_DEFAULTS.items() if values.get(name) is None}
    source = f"{fields.source}: text_config" if architecture == MULTIMODAL else fields.source
    return Fields(source, values | missing)


def refuse_unsupported(fields: Fields, architecture: str) -> None:
    name, activation = ("hidden_act", "silu")
    if architecture in GEMMA3:
        name, activation = ("hidden_activation", "gelu_pytorch_tanh")
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if fields.get(cap) is not None:
                fields.refuse(cap, "null: soft caps are not supported")
        if fields.flag("use_bidirectional_attention", False):
            fields.refuse("use_bidirectional_attention", "false: attention is causal")
    if fields.text(name, activation) != activation:
        fields.refuse(name, f"{activation!r}: other activations are not supported")
    if fields.flag("mlp_bias", False):
        fields.refuse("mlp_bias", "false: biases in the MLP are not supported")
    for name in ("quantization_config", "compression_config"):
        if fields.get(name) is not None:
            fields.refuse(
                name, "no such field: quantized checkpoints are not supported, use one in bf16, f16 or f32"
            )


def read_head_dim(fields: Fields, architecture: str, hidden: int, heads: int) -> int:
    if fields.get("head_dim") is None and architecture != "Qwen3ForCausalLM" and hidden % heads:
        fields.refuse("hidden_size", f"a multiple of num_attention_heads ({heads}), or head_dim to be given")
    derived = QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else hidden // heads
    name = "head_dim" if fields.get("head_dim") is not None else "hidden_size"
    head_dim = fields.whole("head_dim", MAX_HEAD_DIM, default=derived)
    if head_dim % 2:
        fields.refuse(name, f"an even head dimension (it is {head_dim}): rotary embeddings turn pairs")
    if heads * head_dim > MAX_WIDTH:
        fields.refuse(
            "num_attention_heads", f"at most {MAX_WIDTH} values in all heads of dimension {head_dim}"
        )
    return head_dim


def read_windows(fields: Fields, architecture: str, n_layers: int) -> tuple[int, ...]:
    """The sliding window of each layer; 0 where the layer sees the whole context."""
    slides = read_sliding_layers(fields, architecture, n_layers)
    removed = "sliding_window" in fields.values and fields.get("sliding_window") is None
    if not any(slides) or (removed and architecture not in GEMMA3):
        return (0,) * n_layers
    window = fields.whole("sliding_window", MAX_CONTEXT, default=None if removed else DEFAULT_WINDOW)
    return tuple(window if sliding else 0 for sliding in slides)


def read_sliding_layers(fields: Fields, architecture: str, n_layers: int) -> list[bool]:
    """True for each layer whose attention has a sliding window."""
    if architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        return [architecture == "MistralForCausalLM"] * n_layers
    if architecture not in GEMMA3 and not fields.flag("use_sliding_window", False):
        return [False] * n_layers
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != n_layers:
            fields.refuse("layer_types", f"a list of {n_layers} layer types")
        if unknown := [kind for kind in layer_types if kind not in LAYER_TYPES]:
            fields.refuse("layer_types", f"full_attention and sliding_attention only, not {unknown[0]!r}")
        return [kind == "sliding_attention" for kind in layer_types]
    if architecture in GEMMA3:
        pattern = fields.whole("sliding_window_pattern", MAX_LAYERS)
        return [(layer + 1) % pattern != 0 for layer in range(n_layers)]
    first = fields.whole("max_window_layers", MAX_CONTEXT, default=28, low=0)
    return [layer >= first for layer in range(n_layers)]


def read_ids(fields: Fields, name: str, vocab: int) -> tuple[int, ...]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            fields.refuse(name, f"token ids below vocab_size ({vocab})")
    return tuple(dict.fromkeys(ids))
