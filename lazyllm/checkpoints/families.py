"""The model families that run, each a row of features in families.toml."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class Family:
    """The features of a model family, a row of families.toml."""

    model_type: str
    features: Mapping[str, bool | str]
    """Flags of `ModelConfig`, each with its value or with the field that has it."""
    scalings: Mapping[str, str]
    """By the type of RoPE's scaling in files: the rule that it names."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that are missing or null."""
    nullable: Mapping[str, float] = field(default_factory=dict)
    """Values of fields that are missing; null in a file stays null."""
    multimodal: bool = False
    """The text model's fields are in the object `text_config`, whose `model_type` may name another row."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The field that names the activation, and the name that it must have."""
    norms: Literal["pre", "post", "both"] = "pre"
    """The place of norms: before attention and FFN, behind them, or both."""
    eps: str = "rms_norm_eps"
    """The field of the number that norms add to the mean square."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of their length."""
    query_scalar: str | None = None
    """The field whose root divides scores, in place of the head dimension's."""
    scales: Sequence[str] = ()
    """Fields of scales and caps that are read: Granite's multipliers, Cohere's `logit_scale`, SOFT_CAPS. Other
    families refuse SOFT_CAPS."""
    windows: Literal["none", "all", "all_if_used", "pattern", "optional"] = "none"
    """Layers with a sliding window: none; all; all if `use_sliding_window` is set; those that `layer_types` or
    else `sliding_window_pattern` names; or, if `use_sliding_window` is set, those that `layer_types` or else
    `max_window_layers` names."""
    theta: float = 10000.0
    """The base frequency of RoPE in files that leave it out."""
    local_theta: tuple[str, float] | None = None
    """The field and the default of the base frequency in layers with a window, where it differs."""
    partial_rope: bool = False
    """RoPE may rotate only the first values of each head."""
    no_rope: Literal["none", "listed", "full", "full_if_mixed"] = "none"
    """Layers without RoPE: none; those that `no_rope_layers` or else `no_rope_layer_interval` names; those
    without a window; or those without a window unless `sliding_window` is null."""
    ffn: str = "intermediate_size"
    """The field of the FFN's width."""
    expert_ffn: str | None = None
    """The field of the size of each expert, in a family with experts."""
    attention_only: bool = False
    """`layer_types` must name attention in every layer."""
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By field: the only value that runs, if any does, and what other values mean, for errors."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """By part of a tensor's name in files: that part in the core's names; replaced in this order."""


def read_families() -> dict[str, Family]:
    """The rows of families.toml."""
    rows: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    default = rows.pop("default")
    for architecture, row in rows.items():
        base = rows.get(row.pop("like", ""), default)
        tables = {key: base.get(key, {}) | value for key, value in row.items() if isinstance(value, dict)}
        rows[architecture] = base | row | tables
    return {architecture: Family(**row) for architecture, row in rows.items()}


FAMILIES = read_families()
"""The families by architecture."""
BY_TYPE = {family.model_type: architecture for architecture, family in FAMILIES.items()}
