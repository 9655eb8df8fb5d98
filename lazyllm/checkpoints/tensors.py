"""The table of tensors that the core takes, also from checkpoints that rename, fuse or stack them."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from lazyllm.checkpoints.config import MAX_EXPERTS, ModelConfig
from lazyllm.errors import CheckpointError

FUSED = re.compile(r"(?P<layer>.*)\.(?P<parts>self_attn\.qkv|mlp\.gate_up)_proj\.(?P<suffix>weight|bias)")
STACKED = re.compile(r"(?P<prefix>.*\.mlp\.experts)\.(?P<parts>gate_up|gate|up|down)_proj\.weight")
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
ROUTER = ".mlp.gate.weight"  # the end of its name; it is never rounded
BLOCK, Q8_0_BYTES, Q4_1_BYTES = 32, 34, 20  # values, and their bytes in each format


class Tensor(NamedTuple):
    """A tensor of a checkpoint: its `n_bytes` bytes begin at byte `offset` of the file `shard`, an index."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    n_bytes: int


def rounded_bytes(tensors: Iterable[Tensor], weights: str) -> int | None:
    """The bytes of all matrices as `weights` rounds them, q8 or q4 (see `load`); None if one of them is
    quantized or its rows are not whole blocks, so that it cannot be rounded."""
    total = 0
    for name, dtype, shape, *_ in tensors:
        if len(shape) < 2 or name.endswith(ROUTER):
            continue
        if dtype not in ("F32", "F16", "BF16") or shape[-1] % BLOCK:
            return None
        block_bytes = Q4_1_BYTES if weights == "q4" and name not in TABLES else Q8_0_BYTES
        total += math.prod(shape) // BLOCK * block_bytes
    return total


def core_tensors(tensors: Iterable[Tensor], config: ModelConfig, source: Path) -> Iterator[Tensor]:
    """The core's tensors; a fused or stacked tensor gives one for each matrix that it holds."""
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    rows = {
        "self_attn.qkv": {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},
        "mlp.gate_up": {"mlp.gate_proj": config.ffn, "mlp.up_proj": config.ffn},
    }
    for tensor in tensors:
        if not (fused := FUSED.fullmatch(tensor.name)):
            yield from unstacked(tensor)
            continue
        parts = rows[fused["parts"]]
        if tensor.shape[:1] != (sum(parts.values()),):
            expected = f"{' + '.join(map(str, parts.values()))} rows, of {', '.join(parts)}"
            raise CheckpointError(f"{source}: {tensor.name!r} has shape {[*tensor.shape]}; expected {expected}")
        layer, suffix = fused["layer"], fused["suffix"]
        yield from split(tensor, {f"{layer}.{part}.{suffix}": count for part, count in parts.items()})


def renamed(name: str, parts: Mapping[str, str]) -> str:
    """A tensor's name with parts between dots replaced: with {"b": "x"}, "a.b.c" becomes "a.x.c"."""
    for old, new in parts.items():
        name = name.replace(f".{old}.", f".{new}.")
    return name


def unstacked(tensor: Tensor) -> Iterable[Tensor]:
    """The matrices of a tensor that holds those of all experts of a layer; any other tensor alone."""
    stack = STACKED.fullmatch(tensor.name)
    if stack is None or len(tensor.shape) != 3 or not 0 < tensor.shape[0] <= MAX_EXPERTS:
        return [tensor]
    count, rows, columns = tensor.shape
    parts = stack["parts"].split("_")
    names = [f"{stack['prefix']}.{expert}.{part}_proj.weight" for expert in range(count) for part in parts]
    return split(tensor._replace(shape=(count * rows, columns)), dict.fromkeys(names, rows // len(parts)))


def split(tensor: Tensor, parts: Mapping[str, int]) -> Iterator[Tensor]:
    """The consecutive parts of a tensor; `parts` has their numbers of rows by name."""
    row_bytes, offset = tensor.n_bytes // max(sum(parts.values()), 1), tensor.offset
    for name, rows in parts.items():
        n_bytes = rows * row_bytes
        yield tensor._replace(name=name, shape=(rows, *tensor.shape[1:]), offset=offset, n_bytes=n_bytes)
        offset += n_bytes
