"""Toy files for tokenizers and GGUF: a SentencePiece model and a writer of GGUF files; a toy policy."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from families import FAMILIES, RECORDED

from lazyllm import Policy, _core
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.gguf_checkpoint import ARCHITECTURES, FIELDS, LONGROPE, PAIRED, TOP_TENSORS, layer_tensors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
LETTERS = [chr(byte) for byte in range(0x21, 0x7E)] + ["Ġ"]
Files = tuple[dict[str, Any], dict[str, np.ndarray]]
"""The metadata and tensors of a GGUF file."""
NAMED = [*ARCHITECTURES.items(), ("olmo2", "Olmo3ForCausalLM"), ("llama", "MixtralForCausalLM")]
"""Architectures by their names in GGUF files, of which one may hold several."""
FUSED = {
    **{f"self_attn.{name}_proj": "self_attn.qkv_proj" for name in "qkv"},
    **{f"mlp.{name}_proj": "mlp.gate_up_proj" for name in ("gate", "up")},
}
CORPUS = ["the quick brown fox jumps over the lazy dog, it's 2024", "def f(x): return x", "hello world"] * 5


class Paper(Policy):
    """The scores of `Pruning`, in Python."""

    def score(self, view: Any) -> Any:
        return view.attention(1).mean(axis=(0, 1))


def train_pieces(folder: Path) -> Path:
    """Trains a SentencePiece model like Llama's: BPE with byte fallback that preserves white space."""
    from sentencepiece import SentencePieceTrainer

    spaces = {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}
    kind = {"vocab_size": 320, "model_type": "bpe", "byte_fallback": True, "split_digits": True, **spaces}
    place = {"sentence_iterator": iter(CORPUS), "model_prefix": str(folder / "tokenizer"), "minloglevel": 2}
    SentencePieceTrainer.train(**kind, **place, normalization_rule_name="identity")
    return folder / "tokenizer.model"


def write_gguf(
    path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: str | dict[str, str] = "F32"
) -> Path:
    """Writes a GGUF file; vectors are stored as F32, matrices as ggml type `kind`, or the one that it has for
    them. A matrix of bytes is one of blocks already."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, metadata["general.architecture"])
    for name, value in metadata.items():
        if name != "general.architecture":
            writer.add_key_value(name, value, GGUFValueType.get_type(value))
    for name, values in tensors.items():
        name_of_type = "F32" if values.ndim == 1 else kind if isinstance(kind, str) else kind[name]
        stored = GGMLQuantizationType[name_of_type]
        blocks = values if values.dtype == np.uint8 else quantize(values, stored)
        writer.add_tensor(name, blocks, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_metadata(pre: str, merges: list[str], extra: tuple[str, ...] = ("<end>",)) -> dict[str, Any]:
    merges = ["h i", *merges]
    tokens = [*LETTERS, *(merge.replace(" ", "") for merge in merges), *extra]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in extra else NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def stored_values(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint in float32."""
    found = Checkpoint(folder)
    return {
        tensor.name: _core.widen(b"".join(found.chunks(tensor)), tensor.dtype).reshape(tensor.shape)
        for tensor in found.tensors
    }


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleaves the two halves of each head's rows, which is the order of q and k in llama GGUF files."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights with those of all experts of a layer in one tensor."""
    experts: dict[str, list[np.ndarray]] = {}
    for name in sorted(weights, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()]):
        if ".experts." in name:
            experts.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(weights[name])
    others = {name: values for name, values in weights.items() if ".experts." not in name}
    return others | {name: np.stack(matrices) for name, matrices in experts.items()}


def as_gguf(family: str, changes: dict[str, Any] | None = None) -> Files:
    """A GGUF file with a family's recorded checkpoint, and changes; None removes a field or tensor."""
    metadata, tensors = gguf_files(FAMILIES[family].config, stored_values(RECORDED / "families" / family))
    for name, value in (changes or {}).items():
        part: dict[str, Any] = tensors if name.endswith(".weight") else metadata
        part[name] = value
        if value is None:
            del part[name]
    return metadata, tensors


def gguf_files(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Files:
    """A GGUF file of the model that a folder in Hugging Face layout would have with this config.json."""
    config = config | config.get("rope_parameters", {})
    architecture = config["architectures"][0]
    arch = next(arch for arch, named in NAMED if named == architecture)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    fields = {key: config[name] for name, key in FIELDS.items() if config.get(name) is not None}
    if "num_local_experts" in config:
        fields["expert_count"] = config["num_local_experts"]
    fields["attention.head_count_kv"] = kv_heads
    if "head_dim" in config or "partial_rotary_factor" in config:
        fields["rope.dimension_count"] = int(head_dim * config.get("partial_rotary_factor", 1))
    tensors = {}
    scaling = config.get("rope_scaling", {})
    if "short_factor" in scaling:
        tensors = {tensor: np.array(scaling[name], np.float32) for name, tensor in LONGROPE.items()}
        fields["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    elif "alpha" in scaling:
        fields["rope.freq_base"] *= scaling["alpha"] ** (head_dim / (head_dim - 2))
    elif scaling:
        fields |= {"rope.scaling.type": scaling.get("type", scaling.get("rope_type"))}
        fields |= {"rope.scaling.factor": scaling["factor"]}
        fields |= {"rope.scaling.original_context_length": scaling.get("original_max_position_embeddings", 1)}
    if arch == "olmo2" and "sliding_window" in config:
        fields[FIELDS["sliding_window_pattern"]] = [
            (layer + 1) % 4 != 0 for layer in range(config["num_hidden_layers"])
        ]
    metadata = {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in fields.items()}
    short = {hf: name for name, hf in TOP_TENSORS.items()}
    kinds = {core: name for name, core in layer_tensors(arch).items()}
    for core, values in stacked(weights).items():
        if arch in ("gemma2", "gemma3") and core.endswith("norm.weight"):
            values = values + np.float32(1)
        if core in short:
            tensors[short[core]] = values
            continue
        layer, _, rest = core.removeprefix("model.layers.").partition(".")
        kind, _, suffix = rest.rpartition(".")
        name = kinds[FUSED[kind] if FUSED.get(kind) in kinds else kind]
        if arch in PAIRED and name in ("attn_q", "attn_k"):
            values = interleaved(values, heads if name == "attn_q" else kv_heads)
        name = f"blk.{layer}.{name}.{suffix}"
        tensors[name] = np.concatenate([tensors[name], values]) if name in tensors else values
    return metadata | byte_level_metadata("gpt-2", []), tensors
