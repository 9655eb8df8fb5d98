"""The entries of a checkpoint's table of tensors. Those of experts have the same names, one for each matrix,
whatever the checkpoint calls them and however it stacks them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lazyllm.checkpoints.config import MAX_EXPERTS

MIXTRAL = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.weight": ".gate_proj.weight",
    ".w2.weight": ".down_proj.weight",
    ".w3.weight": ".up_proj.weight",
}
NAMES = MIXTRAL | {  # of Granite
    ".mlp.router.layer.weight": ".mlp.gate.weight",
    ".mlp.input_linear.weight": ".mlp.experts.gate_up_proj.weight",
    ".mlp.output_linear.weight": ".mlp.experts.down_proj.weight",
}
STACKED = re.compile(r"(?P<prefix>.*\.mlp\.experts)\.(?P<kind>gate_up|gate|up|down)_proj\.weight")
PARTS = {"gate_up": ("gate", "up")}


class Tensor(NamedTuple):
    """A tensor of a checkpoint: its `n_bytes` bytes begin at byte `offset` of the file `shard`, an index."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    n_bytes: int


def renamed(name: str) -> str:
    """A tensor's name with the experts' parts called as in Qwen3 MoE and OLMoE."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def hub_name(name: str, architecture: str) -> str:
    """The name that files of this architecture have in place of ours."""
    if architecture == "MixtralForCausalLM":
        for theirs, ours in reversed(MIXTRAL.items()):
            name = name.replace(ours, theirs)
    return name


def unstacked(tensor: Tensor) -> Iterator[Tensor]:
    """The matrices of a tensor that holds those of all experts; of another one, itself."""
    stack = STACKED.fullmatch(tensor.name)
    if stack is None or len(tensor.shape) != 3 or not 0 < tensor.shape[0] <= MAX_EXPERTS:
        yield tensor
        return
    count, rows, columns = tensor.shape
    parts = PARTS.get(stack["kind"], (stack["kind"],))
    n_bytes = tensor.n_bytes // (count * len(parts))
    for i in range(count * len(parts)):
        expert, part = divmod(i, len(parts))
        yield tensor._replace(
            name=f"{stack['prefix']}.{expert}.{parts[part]}_proj.weight",
            shape=(rows // len(parts), columns),
            offset=tensor.offset + i * n_bytes,
            n_bytes=n_bytes,
        )


def experts_apart(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The table of tensors with a matrix for each part of each expert."""
    return [matrix for tensor in tensors for matrix in unstacked(tensor._replace(name=renamed(tensor.name)))]
