"""What a checkpoint's config.json says about its model, checked and in the engine's own terms."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.fields import Fields, read_json
from lazyllm.rope import MOST_CONTEXT, read_rope

MOST_LAYERS = 4096
MOST_WIDTH = 1 << 20
MOST_HEAD_DIM = 512
MOST_VOCAB = 1 << 24
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
LLAMA_CONTEXT = 2048
MISTRAL_WINDOW = 4096
QWEN3_HEAD_DIM = 128
DESCRIPTION = ("name", "architecture", "bos_token_id", "eos_token_ids", "context_note")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. `context` is the most tokens a session may hold, `context_note` says why."""

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
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    context_note: str = ""

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """From config.json, and generation_config.json where there is one, in `path`."""
        folder = Path(path)
        generation = folder / "generation_config.json"
        return cls.from_dict(
            read_json(folder / "config.json"),
            read_json(generation) if generation.exists() else {},
            folder=folder,
        )

    @classmethod
    def from_dict(
        cls, config: dict[str, Any], generation: dict[str, Any] | None = None, folder: str | Path = ""
    ) -> ModelConfig:
        """From the contents of config.json and generation_config.json; `folder` is what errors name."""
        fields = Fields(Path(folder) / "config.json", config)
        architecture = read_architecture(fields)
        refuse_unsupported(fields)
        heads = fields.whole("num_attention_heads", MOST_WIDTH)
        kv_heads = fields.whole("num_key_value_heads", heads, default=heads)
        if heads % kv_heads:
            fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        hidden = fields.whole("hidden_size", MOST_WIDTH)
        head_dim = read_head_dim(fields, architecture, hidden, heads)
        longest = LLAMA_CONTEXT if architecture == "LlamaForCausalLM" else None
        rope = read_rope(
            fields, head_dim, fields.whole("max_position_embeddings", MOST_CONTEXT, default=longest)
        )
        window = read_window(fields, architecture, n_layers := fields.whole("num_hidden_layers", MOST_LAYERS))
        note = ""
        if window is not None and window < rope.context:
            note = f"limited to the sliding window of {window} tokens, within which attention is full"
        attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and fields.flag(
            "attention_bias", False
        )
        vocab = fields.whole("vocab_size", MOST_VOCAB)
        eos_source = Fields(Path(folder) / "generation_config.json", generation or {})
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
            ffn=fields.whole("intermediate_size", MOST_WIDTH),
            vocab=vocab,
            context=min(rope.context, window or rope.context),
            norm_eps=fields.number("rms_norm_eps", 0.0, 0.1, default=1e-6),
            inv_freq=rope.inv_freq,
            rope_scale=rope.scale,
            tied=fields.flag("tie_word_embeddings", False),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=attention_bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
            bos_token_id=next(iter(read_ids(fields, "bos_token_id", vocab)), None),
            eos_token_ids=read_ids(eos_source, "eos_token_id", vocab),
            context_note=note,
        )

    def core(self) -> dict[str, Any]:
        """The fields that the C core takes."""
        fields = asdict(self)
        for name in DESCRIPTION:
            del fields[name]
        return fields | {"inv_freq": np.array(self.inv_freq, np.float32)}


def model_name(folder: Path) -> str:
    """The folder's name, or in the hub's cache (models--owner--name/snapshots/commit) the id."""
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


def refuse_unsupported(fields: Fields) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        fields.refuse("hidden_act", "'silu': other activations are not supported")
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
    head_dim = fields.whole("head_dim", MOST_HEAD_DIM, default=derived)
    if head_dim % 2:
        fields.refuse(name, f"an even head dimension (it is {head_dim}): rotary embeddings turn pairs")
    if heads * head_dim > MOST_WIDTH:
        fields.refuse(
            "num_attention_heads", f"at most {MOST_WIDTH} values in all heads of dimension {head_dim}"
        )
    return head_dim


def read_window(fields: Fields, architecture: str, n_layers: int) -> int | None:
    """The sliding window that at least one layer has."""
    if architecture == "LlamaForCausalLM":
        return None
    if architecture == "MistralForCausalLM":
        if "sliding_window" in fields.values and fields.get("sliding_window") is None:
            return None
        return fields.whole("sliding_window", MOST_CONTEXT, default=MISTRAL_WINDOW)
    if not fields.flag("use_sliding_window", False):
        return None
    layer_types = fields.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != n_layers:
            fields.refuse("layer_types", f"a list of {n_layers} layer types")
        if unknown := [kind for kind in layer_types if kind not in ("full_attention", "sliding_attention")]:
            fields.refuse("layer_types", f"full_attention and sliding_attention only, not {unknown[0]!r}")
        slides = "sliding_attention" in layer_types
    else:
        slides = fields.whole("max_window_layers", MOST_CONTEXT, default=28, least=0) < n_layers
    if not slides or ("sliding_window" in fields.values and fields.get("sliding_window") is None):
        return None
    return fields.whole("sliding_window", MOST_CONTEXT, default=MISTRAL_WINDOW)


def read_ids(fields: Fields, name: str, vocab: int) -> tuple[int, ...]:
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            fields.refuse(name, f"token ids below vocab_size ({vocab})")
    return tuple(dict.fromkeys(ids))
