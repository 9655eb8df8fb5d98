"""A model in one GGUF file, described like a folder in Hugging Face layout."""

import math
import re
from array import array
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.config import MAX_HEAD_DIM, MAX_WIDTH, ModelConfig
from lazyllm.checkpoints.families import BY_TYPE, FAMILIES, FULL, SLIDING, SOFT_CAPS
from lazyllm.checkpoints.fields import Fields
from lazyllm.checkpoints.gguf_file import NAMES, Reader
from lazyllm.checkpoints.gguf_tokenizer import GgufVocabulary
from lazyllm.checkpoints.tensors import Tensor, core_tensors, unstacked
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.errors import CheckpointError
from lazyllm.support.files import OpenedFile

FIELDS: dict[str, str] = NAMES["required"] | NAMES["optional"]
TOP_TENSORS: dict[str, str] = NAMES["top"]
MODEL_TYPES: dict[str, str] = {arch: arch for arch in NAMES["model_types"]} | NAMES["other_model_types"]
ARCHITECTURES = {arch: BY_TYPE[model_type] for arch, model_type in MODEL_TYPES.items()}
PAIRED: list[str] = NAMES["paired"]
LAYER_TENSOR = re.compile(r"blk\.(?P<layer>[0-9]{1,9})\.(?P<kind>\w+)\.(?P<suffix>weight|bias)")
SPECIAL_IDS = ("bos_token_id", "eos_token_id")
EMBEDDING, ROPE_DIVISORS = "token_embd.weight", "rope_freqs.weight"
LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def layer_tensors(arch: str) -> dict[str, str]:
    """The core's names of the tensors of a layer, by their names in files of a GGUF architecture."""
    return {**NAMES["layer"], **NAMES["norms"][FAMILIES[ARCHITECTURES[arch]].norms], **NAMES["own"].get(arch, {})}


class GgufCheckpoint(Checkpoint):
    """Like `Checkpoint`, from a GGUF file in place of a folder.

    `config_json` and `generation_config` are the contents of the files that a folder would have. The file's
    `named_tensors` have the core's names. Unlike in a folder, Gemma's norms have 1 added already, and with
    `is_paired` the two rows of each of RoPE's pairs lie side by side in q and k.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            self.metadata, tensors = Reader(path, file).read()
        self.shards, self.config_files = [str(self.path)], []
        self.shard_files = self.tokenizer_files = [OpenedFile(self.path)]
        self.fields = Fields(self.path, self.metadata)
        self.arch = str(self.fields.get("general.architecture"))
        if self.arch not in ARCHITECTURES:
            self.fields.refuse("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
        self.gemma, self.is_paired = self.arch in LAYERS_OF_27B, self.arch in PAIRED
        self.architecture = ARCHITECTURES[self.arch]
        if self.arch == "llama" and self.field("expert_count"):
            self.architecture = "MixtralForCausalLM"
        if self.arch == "olmo2" and self.field(FIELDS["sliding_window"]):
            self.architecture = "Olmo3ForCausalLM"
        self.stored = {tensor.name: tensor for tensor in tensors}
        kinds = layer_tensors(self.arch)
        self.named_tensors = [
            matrix
            for tensor in tensors
            if tensor.name not in (ROPE_DIVISORS, *LONGROPE.values())
            for matrix in unstacked(tensor._replace(name=self.core_name(tensor.name, kinds)))
        ]
        self.names = {name: f"{self.arch}.{key}" for name, key in (FIELDS | NAMES["rope"]).items()}
        self.config_json = self.read_config()
        self.generation_config = {name: self.config_json[name] for name in SPECIAL_IDS}
        end, turn_end = self.config_json["eos_token_id"], self.metadata.get("tokenizer.ggml.eot_token_id")
        if turn_end not in (None, end):  # an answer ends at the end of a turn, too
            self.generation_config["eos_token_id"] = turn_end if end is None else [end, turn_end]
        fields = Fields(self.path, self.config_json, self.names)
        config = ModelConfig.read(fields, Fields(self.path, self.generation_config))
        paired_rope = self.is_paired or config.paired_rope
        self.config = replace(config, name=self.path.stem, norm_plus_one=False, paired_rope=paired_rope)
        self.tensors = list(core_tensors(self.named_tensors, self.config, self.path))

    @cached_property
    def vocabulary(self) -> GgufVocabulary | None:
        return GgufVocabulary(self.path, self.metadata) if "tokenizer.ggml.model" in self.metadata else None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_gguf(self.vocabulary, self.config) if self.vocabulary else None

    def core_name(self, name: str, kinds: dict[str, str]) -> str:
        part = LAYER_TENSOR.fullmatch(name)
        if name in TOP_TENSORS:
            return TOP_TENSORS[name]
        if part and part["kind"] in kinds:
            return f"model.layers.{int(part['layer'])}.{kinds[part['kind']]}.{part['suffix']}"
        self.refuse_tensor(name, f"has no place in a {self.architecture} model")

    def refuse_tensor(self, name: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: tensor {name!r} {problem}")

    def field(self, key: str) -> Any:
        return as_json(self.metadata.get(f"{self.arch}.{key}"))

    def read_config(self) -> dict[str, Any]:
        """The contents of config.json; where a field is missing, it has the value that llama.cpp assumes."""
        embedding, family = self.stored.get(EMBEDDING), FAMILIES[self.architecture]
        if embedding is None or len(embedding.shape) != 2:
            self.refuse_tensor(EMBEDDING, "is missing or no matrix")
        values = {"rope_theta": 10000.0, family.activation[0]: family.activation[1]}
        values |= {name: value for name, key in FIELDS.items() if (value := self.field(key)) is not None}
        values |= {name: values[name] or None for name in SOFT_CAPS if name in values}  # 0: no cap
        fields = Fields(self.path, values, self.names)
        for name in NAMES["required"]:
            if name not in values:
                fields.refuse(name, "a value: every GGUF file has it")
        heads, hidden = fields.whole("num_attention_heads", MAX_WIDTH), fields.whole("hidden_size", MAX_WIDTH)
        head_dim = fields.whole("head_dim", MAX_HEAD_DIM, default=hidden // heads)
        assumed = family.nullable["sliding_window"] if self.arch == "gemma2" else None
        window = values.get("sliding_window", assumed) or None
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": family.model_type,
            "num_key_value_heads": heads,
            **values,
            "head_dim": head_dim,
            "sliding_window": window,
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in self.stored,
            **{name: self.metadata.get(f"tokenizer.ggml.{name}") for name in SPECIAL_IDS},
        }
        pattern = values.get("sliding_window_pattern", family.defaults.get("sliding_window_pattern"))
        if isinstance(pattern, list):
            config["layer_types"] = [SLIDING if slides else FULL for slides in pattern]
            del config["sliding_window_pattern"]
        elif self.gemma:
            config["sliding_window_pattern"] = pattern if window else 1
        if self.gemma:
            is_27b = values["num_hidden_layers"] == LAYERS_OF_27B[self.arch]
            config["query_pre_attn_scalar"] = hidden // heads if is_27b else head_dim
        rotary = f"{self.arch}.rope.dimension_count"
        if family.partial_rope:
            config["partial_rotary_factor"] = self.fields.whole(rotary, head_dim, default=head_dim) / head_dim
        else:
            self.fields.only(rotary, head_dim, "partial rotary embeddings")
        if family.expert_ffn:
            config["norm_topk_prob"] = self.arch != "olmoe"
        else:
            self.fields.only(f"{self.arch}.expert_count", 0, "mixtures of experts")
        for flag, tensor in (("o_bias", "attn_output"), ("qkv_bias", "attn_q")):
            if isinstance(bias := family.features.get(flag), str):
                config[bias] = f"blk.0.{tensor}.bias" in self.stored
        return config | self.rope_scaling(config["max_position_embeddings"])

    def rope_scaling(self, context: int) -> dict[str, Any]:
        """The fields of config.json about RoPE's scaling; {} without scaling. Files of Llama 3.1 hold divisors of
        frequencies in place of the rule; they become a longrope whose two tables are equal."""
        name = "original_max_position_embeddings"
        scaling = {key: value for key, field in NAMES["rope"].items() if (value := self.field(field)) is not None}
        tensors = dict.fromkeys(LONGROPE, ROPE_DIVISORS) if ROPE_DIVISORS in self.stored else LONGROPE
        if not set(tensors.values()) <= set(self.stored):
            return {"rope_scaling": scaling} if scaling.get("rope_type", "none") != "none" else {}
        original = context if ROPE_DIVISORS in self.stored else scaling.get(name)
        factors = {key: self.values_of(self.stored[tensor]) for key, tensor in tensors.items()}
        return {name: original, "rope_scaling": {"rope_type": "longrope", **factors}}

    def values_of(self, tensor: Tensor) -> list[float]:
        if (count := math.prod(tensor.shape)) > MAX_HEAD_DIM:
            self.refuse_tensor(tensor.name, f"has {count} values; expected one for each pair of a head")
        return [as_json(float(value)) for value in _core.widen(b"".join(self.chunks(tensor)), tensor.dtype)]


def as_json(value: Any) -> Any:
    """A value as JSON has it, a float in its shortest form: 1e-05 for 9.999999747378752e-06."""
    if isinstance(value, array):
        return value.tolist()
    return float(str(np.float32(value))) if isinstance(value, float) else value
