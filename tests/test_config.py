"""config.json: the fields of every family, the values of every RoPE scaling, and refused configs."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, LLAMA3, LONGROPE, YARN, config_of, family_config
from hypothesis import given
from hypothesis import strategies as st

from lazyllm import CheckpointError
from lazyllm.checkpoints.config import ModelConfig


def read(name: str = "Llama", **fields: Any) -> ModelConfig:
    return config_of(family_config(f"{name}ForCausalLM", **fields))


def angles(head_dim: int = 8, theta: float = 10000.0) -> np.ndarray:
    return theta ** -(np.arange(0, head_dim, 2) / head_dim)


HYBRID = {"layer_types": ["attention"] * 3, "num_local_experts": 0, "position_embedding_type": "rope"}
WINDOWED = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
PLAIN = {"qkv_bias": False, "o_bias": False, "qk_norm": False}
OLD = dict.fromkeys(["rope_theta", "max_position_embeddings", "rms_norm_eps", "hidden_act"])
MIXED = ["full_attention", "sliding_attention", "full_attention"]
QWEN = {"sliding_window": 64, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("Llama", {"num_key_value_heads": None}, {"n_kv_heads": 4}),
        ("Llama", OLD, {"context": 2048, "norm_eps": 1e-6, "inv_freq": read().inv_freq}),
        ("Qwen2", {"architectures": None}, PLAIN | {"qkv_bias": True}),
        ("Qwen3", {}, PLAIN | {"qk_norm": True, "head_dim": 128}),
        ("Phi3", {}, PLAIN | {"windows": (0, 0, 0), "rotary_dim": 8, "short_context": 128, "norm_eps": 1e-5}),
        ("SmolLM3", {"num_hidden_layers": 5}, {"layer_rope": (0, 0, 0, 1, 0), "tied": False}),
        ("SmolLM3", {"tie_word_embeddings": None}, {"tied": True}),
        ("SmolLM3", {"no_rope_layers": [0, 0, 0]}, {"layer_rope": (0, 0, 0), "inv_freq": ((0.0,) * 4,)}),
        ("SmolLM3", WINDOWED | {"no_rope_layers": [0, 1, 0]}, {"windows": (9, 0, 9), "layer_rope": (1, 0, 1)}),
        ("Ministral3", {}, {"query_growth": 0.1, "query_step": 16384, "head_dim": 128, "context": 262144}),
        ("Ministral3", {"rope_parameters": {"rope_theta": 1e6}}, {"query_growth": 0.0, "windows": (0, 0, 0)}),
        ("Granite", {}, {"embedding_scale": 1.0, "logit_scale": 1.0, "query_scalar": 1.0, "norm_eps": 1e-5}),
        (
            "Exaone4",
            {"sliding_window": 300, "sliding_window_pattern": 3},
            {"windows": (0, 0, 0), "layer_rope": (0, 0, 1)},
        ),
        ("SeedOss", {}, {"qkv_bias": True, "o_bias": False, "head_dim": 128}),
        ("SeedOss", {"attention_out_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ("Ernie4_5", {"use_bias": False}, PLAIN | {"paired_rope": True, "rotary_dim": 128}),
        ("Helium", {"attention_bias": True}, {"qkv_bias": True, "o_bias": False, "paired_rope": True}),
        ("Glm", {}, {"qkv_bias": True, "o_bias": False, "rotary_dim": 64, "post_norms": False}),
        ("Qwen3Moe", {}, {"n_experts": 6, "experts_per_token": 3, "expert_ffn": 24, "normed_experts": False}),
        ("Mistral", {"sliding_window": 127}, {"windows": (127, 127, 127)}),
        ("Mistral", {"sliding_window": 128}, PLAIN | {"windows": (0, 0, 0)}),  # it reaches the whole context
        ("Qwen2", QWEN | {"max_window_layers": 3}, {"windows": (0, 0, 0)}),
        ("Qwen3", QWEN | {"layer_types": MIXED}, {"windows": (0, 64, 0)}),
        ("Llama", {"sliding_window": 64}, {"windows": (0, 0, 0)}),
        ("Mixtral", {}, {"windows": (0, 0, 0)}),  # unlike Mistral, it has none unless it is named
        ("Qwen3Moe", {"sliding_window": 64}, {"windows": (0, 0, 0)}),
        ("Gemma3", {"sliding_window": 64}, {"windows": (64, 64, 64)}),
        ("Gemma3", {"sliding_window": 64, "sliding_window_pattern": 1}, {"windows": (0, 0, 0)}),
        ("Gemma3", {"sliding_window_pattern": 2}, {"windows": (0, 0, 0)}),
    ],
)
def test_features_of_families(architecture: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Covers fields that files leave out, above all: test_families.py has each family as transformers runs it."""
    config = read(architecture, **fields)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.architecture == f"{architecture}ForCausalLM"


def test_a_model_that_turns_only_in_windows_needs_their_size() -> None:
    fields = family_config("Cohere2ForCausalLM") | {"sliding_window": None}
    with pytest.raises(CheckpointError, match="sliding_window is missing; expected a whole number"):
        config_of(fields)
    config = config_of(fields | {"layer_types": ["full_attention"] * 3})
    assert (config.windows, np.any(config.inv_freq)) == ((0, 0, 0), False)


def test_names_and_ends(tmp_path: Path) -> None:
    """Ends come from generation_config.json first; a hub's snapshot is named by its id."""
    folder = tmp_path / "models--owner--tiny" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(family_config("LlamaForCausalLM")), encoding="utf-8")
    assert ModelConfig.from_folder(folder).eos_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9, 7]}', encoding="utf-8")
    config = ModelConfig.from_folder(folder)
    assert (config.eos_token_ids, config.name) == ((7, 9), "owner/tiny")
    named = folder.rename(tmp_path / "named")
    assert ModelConfig.from_folder(named).name == "named"


def nested(**text: Any) -> dict[str, Any]:
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    return fields | {"eos_token_id": [1, 106], "text_config": text, "vision_config": {"model_type": "siglip"}}


def test_gemma3_fields_that_files_leave_out() -> None:
    """The fields that a 4B checkpoint on the hub has; the rest are defaults of transformers."""
    fields: dict[str, Any] = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 1024}
    fields |= {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = config_of(nested(model_type="gemma3_text", **fields))
    assert (config.n_layers, config.hidden, config.ffn, config.vocab) == (34, 2560, 10240, 262208)
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.context) == (8, 4, 256, 131072)
    assert (config.tied, config.qk_norm, config.qkv_bias, config.norm_eps) == (True, True, False, 1e-6)
    assert config.windows == tuple(0 if (layer + 1) % 6 == 0 else 1024 for layer in range(34))
    assert config.embedding_scale == np.float32(math.sqrt(2560))
    assert (config.query_scalar, config.eos_token_ids) == (256, (1, 106))
    np.testing.assert_allclose(config.inv_freq[0], angles(256, 1e6) / 8, rtol=2e-7)
    np.testing.assert_allclose(config.inv_freq[1], angles(256), rtol=2e-7)


GEMMA_27B = {"model_type": "gemma2", "num_hidden_layers": 46, "hidden_size": 4608, "head_dim": 128}
COHERE2 = {"rms_norm_eps": None, "num_hidden_layers": 8, "rope_theta": None, "max_position_embeddings": 8192}
MISTRAL3 = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
TEXT = {"num_attention_heads": 32, "query_pre_attn_scalar": 168, "eos_token_id": 5}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (GEMMA_27B, {"attention_cap": 50.0, "logit_cap": 30.0, "windows": (4096, 0) * 23}),  # as on the hub
        (GEMMA_27B | {"attn_logit_softcapping": None, "final_logit_softcapping": 7.5}, {"attention_cap": 0.0}),
        (GEMMA_27B | {"final_logit_softcapping": 7.5}, {"attention_cap": 50.0, "logit_cap": 7.5}),
        (family_config("Qwen2ForCausalLM", **WINDOWED) | {"sliding_window": None}, {"windows": (0, 0, 0)}),
        (family_config("Cohere2ForCausalLM", **COHERE2), {"norm_eps": 1e-5, "logit_scale": 0.0625, "parallel": True}),
        (family_config("Cohere2ForCausalLM", **COHERE2), {"windows": (4096, 4096, 4096, 0) * 2, "layer_norm": True}),
        # of the text config and not a default; the end is that of the outer config, which is the model's own
        (nested(**TEXT), {"n_heads": 32, "query_scalar": 168, "eos_token_ids": (1, 106), "tied": True}),
        (nested() | {"tie_word_embeddings": False}, {"tied": False}),
        (MISTRAL3 | {"text_config": FAMILIES["mistral"].config}, {"query_growth": 0.0}),
        (MISTRAL3 | {"text_config": FAMILIES["ministral3"].config}, {"query_growth": 0.5}),
    ],
)
def test_defaults_null_and_text_configs(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    config = config_of(fields)
    assert {name: getattr(config, name) for name in expected} == expected


def test_gemma3_ropes_of_transformers_5() -> None:
    layers = {"sliding_window": 16, "sliding_window_pattern": 2}
    linear = {"rope_type": "linear", "factor": 4.0}
    bases = {"rope_theta": 5e5, "rope_local_base_freq": 2e4}
    old = read("Gemma3", rope_scaling=linear, **layers, **bases)
    ropes = {"full_attention": linear | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    assert read("Gemma3", rope_theta=None, rope_parameters=ropes, **layers) == old
    np.testing.assert_allclose(old.inv_freq, [angles(theta=5e5) / 4, angles(theta=2e4)], rtol=2e-7)
    defaults = read("Gemma3", rope_theta=None, **layers)
    np.testing.assert_allclose(defaults.inv_freq, [angles(theta=1e6), angles(theta=1e4)], rtol=2e-7)
    assert len(read("Gemma3", sliding_window_pattern=1).inv_freq) == 1


def test_rope_yarn_and_its_attention_factor() -> None:
    config = read(rope_scaling=YARN)
    np.testing.assert_allclose(config.inv_freq[0][0], 1.0, rtol=1e-7)
    np.testing.assert_allclose(config.inv_freq[0][-1], angles()[-1] / 4, rtol=1e-6)
    assert math.isclose(config.rope_scale[0], 0.1 * math.log(4) + 1)
    assert read(rope_scaling=YARN | {"attention_factor": 1.25}).rope_scale == (1.25,)
    assert read(rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}).rope_scale == (1.0,)
    at_once = read(rope_scaling=YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False})
    assert set((angles() / at_once.inv_freq[0]).round(3)) == {1.0, 4.0}  # no pairs in between
    assert config.context == 128  # the factor times the original
    assert read(rope_scaling=YARN | {"original_max_position_embeddings": 128}).context == 512


def test_longrope_has_frequencies_for_each_length() -> None:
    fields = {"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE}
    config = read("Phi3", original_max_position_embeddings=32, **fields)
    plain = np.append(angles(6), 0)
    np.testing.assert_allclose(config.inv_freq[0], plain / [1.0, 1.1, 1.5, 1], rtol=1e-6)
    np.testing.assert_allclose(config.inv_freq[1], plain / [1.2, 2.5, 5.0, 1], rtol=1e-6)
    assert (config.layer_rope, config.short_context, config.context) == ((0, 0, 0), 32, 128)
    np.testing.assert_allclose(config.rope_scale, math.sqrt(1 + math.log(4) / math.log(32)))
    for name in ("su", "yarn"):  # names of Phi-3's first files
        named = read("Phi3", rope_scaling=LONGROPE | {"type": name}, partial_rotary_factor=0.75)
        assert named.short_context == 128
    mixed = read(
        "SmolLM3",
        rope_scaling=LONGROPE | {"original_max_position_embeddings": 32, "attention_factor": 2} | FOUR,
        no_rope_layers=[1, 0, 1],
    )
    assert (mixed.layer_rope, mixed.rope_scale) == ((0, 2, 0), (2.0, 2.0, 1.0, 1.0))


FOUR = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
WRONG: dict[str, dict[str, list[Any]]] = {
    "Llama": {"architectures": ["LlamaForCausalLM", [[]]], "hidden_size": [30, 36], "eos_token_id": [-1]},
    "GraniteMoeHybrid": {"layer_types": [5, ["mamba", "attention"]]},
    "Phi3": {"partial_rotary_factor": [0.2, 0.4, 1.5]},
    "SmolLM3": {"no_rope_layers": [[1, 0], [1, 0, 2], [1, 0, True], "101"], "no_rope_layer_interval": [0]},
    "Granite": {"residual_multiplier": [0], "logits_scaling": ["8"], "embedding_multiplier": [1e4, -0.1]},
    "Exaone4": {"sliding_window_pattern": ["LLLG"]},
    "SeedOss": {"attention_out_bias": [1]},
    "Cohere": {"use_qk_norm": [1], "logit_scale": [0], "layer_norm_eps": ["a"]},
    "Cohere2": {"sliding_window_pattern": [0]},
    "Gemma2": {"attn_logit_softcapping": [0], "final_logit_softcapping": ["30"]},
    "Gemma3": {
        **{"query_pre_attn_scalar": [0], "sliding_window_pattern": [0], "sliding_window": [0]},
        **{"layer_types": [["full_attention"]], "rope_local_base_freq": [0]},
    },
    "Mixtral": {"num_local_experts": [1025], "num_experts_per_tok": [0, 9]},
    "Qwen3Moe": {
        **{"num_experts": [0], "moe_intermediate_size": [-4], "norm_topk_prob": [1]},
        **{"decoder_sparse_step": [0], "mlp_only_layers": [[True], 3]},
    },
}
"""By family and field, values that are refused by both."""
REFUSED = [
    *(
        (family, {name: value}, f"{name} is {re.escape(repr(value))}; expected ")
        for family, fields in WRONG.items()
        for name, values in fields.items()
        for value in values
    ),
    ("Llama", {"architectures": ["Qwen3NextForCausalLM"]}, "another architecture: it has recurrent layers"),
    ("Llama", {"architectures": ["DeepseekV3ForCausalLM"]}, "another architecture: its layers keep latents"),
    ("Llama", {"architectures": ["Gemma3nForCausalLM"]}, "its layers have embeddings of their own"),
    ("Llama", {"architectures": None, "model_type": ["llama"]}, r"model_type is \['llama'\]"),
    ("GraniteMoeHybrid", {}, "layer_types is missing; expected layers of attention: it has recurrent layers"),
    ("GraniteMoeHybrid", HYBRID | {"num_local_experts": None}, "is 8; expected 0: mixtures of experts"),
    ("GraniteMoeHybrid", HYBRID | {"position_embedding_type": "nope"}, "is 'nope'; expected 'rope'"),
    ("Phi3", {"rope_scaling": LONGROPE}, "short_factor is .*; expected a list of 4 numbers"),
    ("Phi3", {"rope_scaling": LONGROPE | FOUR | {"long_factor": [1, 1, 1, 0]}}, "long_factor: 3 is 0; expec"),
    ("Phi3", {"rope_scaling": LONGROPE | FOUR | {"attention_factor": 0}}, "attention_factor is 0; expected"),
    ("Ministral3", {"rope_parameters": {"llama_4_scaling_beta": -1}}, "llama_4_scaling_beta is -1"),
    ("Ernie4_5", {"use_bias": True}, "use_bias is True; expected false: biases in the MLP"),
    ("HunYuanDenseV1", {"rope_scaling": {"type": "dynamic"}}, "alpha is missing"),
    ("Llama", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "rope_scaling: partial"),
    ("Llama", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling: rope_type is 'dynamic'"),
    ("Llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor is 1.0;.*low_freq"),
    ("Llama", {"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "position_embeddings is 0"),
    ("Llama", {"rope_scaling": YARN | {"mscale": -90.0, "mscale_all_dim": 1.0}}, "mscale"),
    ("Llama", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": -10 / math.log(4)}}, "mscale"),
    ("Llama", {"rope_parameters": {"full_attention": {}}}, "rope_parameters.*layer type"),
    ("Llama", {"rope_scaling": {"full_attention": {}}}, "rope_scaling.*layer type"),
    ("Llama", {"num_attention_heads": 4096, "head_dim": 512}, "is 4096; expected at most 1048576 values"),
    ("Llama", {"attn_logit_softcapping": 50}, "attn_logit_softcapping is 50; .*soft caps in a llama"),
    ("Gemma3", {"use_bidirectional_attention": True}, "attention is True; expected false: .* not causal"),
    ("Gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; expected 'gelu_pytorch_tanh'"),
    ("Gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.*full_attention, sliding"),
    ("Gemma3", {"rope_parameters": {"full_attention": {"type": "linear"}}}, "full_attention: factor is miss"),
    ("Qwen2", QWEN | {"layer_types": [*MIXED[:2], "other"]}, "'other'"),
    ("Mixtral", {"num_local_experts": None}, "num_experts is missing; expected a whole number"),
    ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; expected null: clipped queries"),
    ("text", {"text_config": {"num_hidden_layers": 0}}, "text_config: num_hidden_layers is 0"),
    ("text", {"text_config": None}, "text_config is missing; expected an object"),
    ("text", {"text_config": {"sliding_window": None}}, "text_config: sliding_window is missing"),
    ("text", {"text_config": {"model_type": "bert"}}, "text_config: model_type is 'bert'; expected one of"),
    ("text", {"quantization_config": {"bits": 4}}, "text_config: quantization_config is"),
]


@pytest.mark.parametrize(("family", "fields", "words"), REFUSED)
def test_refused_by_field_and_value(family: str, fields: dict[str, Any], words: str) -> None:
    """The fields of a family, or of a multimodal Gemma 3."""
    config = nested() | fields if family == "text" else family_config(f"{family}ForCausalLM", **fields)
    with pytest.raises(CheckpointError, match=rf"^config\.json: .*{words}"):
        config_of(config)


WORDS = st.text(max_size=8) | st.sampled_from(["yarn", "llama3", "longrope"])
NAMES_INSIDE = st.sampled_from([*LLAMA3, "type"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES_INSIDE, inner, max_size=6),
    max_leaves=8,
)
configs = [*(family.config for family in FAMILIES.values()), nested(**FAMILIES["gemma3"].config)]
names = sorted(
    {name for family in FAMILIES.values() for name in family.config}
    | {"no_rope_layer_interval", "attention_out_bias"}
    | {"rope_parameters", "layer_types", "sliding_window_pattern", "rope_local_base_freq", "text_config"}
)


@given(st.sampled_from(configs), st.dictionaries(st.sampled_from(names), values, max_size=4))
def test_any_fields_give_a_config_or_a_checkpoint_error(base: dict[str, Any], fields: dict[str, Any]) -> None:
    try:
        config = config_of(base | fields)
    except CheckpointError:
        return
    core = config.core()
    assert np.isfinite(core["inv_freq"]).all()
    assert config.n_heads % config.n_kv_heads == 0
    assert all(0 < scale < math.inf for scale in core["rope_scale"])
    assert 0 < core["logit_scale"] < math.inf
    assert all(0 <= window <= 1 << 28 for window in core["windows"])
