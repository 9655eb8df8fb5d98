"""Models with experts: counted work, folders and formats of weights, stacked tensors."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from folders import model_folder
from reference import Reference
from safetensors import safe_open
from tiny import Build, Shape, pruning
from toys import as_gguf, write_gguf

import lazyllm
from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.checkpoints.families import FAMILIES
from lazyllm.checkpoints.gguf import convert
from lazyllm.checkpoints.tensors import Tensor, renamed, unstacked
from lazyllm.counted_work import bare_flops

SHAPE = Shape(seed=41, n_layers=4, qk_norm=True, n_experts=5, experts_per_token=2, expert_ffn=32)
SHAPE = replace(SHAPE, ffn=64, expert_layers=(1,), vocab=300)
SHAPES = {
    "no experts": replace(SHAPE, n_experts=0, experts_per_token=0, expert_ffn=0, expert_layers=(0,)),
    "experts": SHAPE,
    "in some layers": replace(SHAPE, expert_layers=(1, 0, 1, 1)),
    "windows": replace(SHAPE, windows=(0, 6), normed_experts=True),
}


class Counting(Reference):
    """Counts two operations for each multiplication with a weight, and of attention, by layer and token."""

    work = 0.0

    def end_layer(
        self, layer: int, rows: dict[int, np.ndarray], in_play: list[int], hidden: dict[int, np.ndarray]
    ) -> None:
        """In the last layer the query token alone has more than keys and values."""
        if layer == self.n_layers - 1:
            rows = {max(rows): rows[max(rows)]}
        width = self.config["n_heads"] * self.config["head_dim"]
        self.work += 4 * width * sum(np.count_nonzero(row[0]) for row in rows.values())
        self.work += 2 * width * self.config["hidden"] * len(rows)  # queries
        super().end_layer(layer, rows, in_play, hidden)

    def linear(self, x: np.ndarray, name: str, bias: bool = False) -> np.ndarray:
        self.work += 2 * self.weights[name + ".weight"].size * (not name.endswith("q_proj"))
        return super().linear(x, name, bias)

    def logits(self, x: np.ndarray) -> np.ndarray:
        self.work += 2 * self.config["vocab"] * self.config["hidden"]
        return super().logits(x)


@pytest.mark.parametrize("stages", [[], [(0, 0.5)]], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_counted_work_is_that_of_the_reference(tiny_of: Build, name: str, stages: list[Any]) -> None:
    """Scores aside, in a prompt and in a decode step that revives tokens."""
    made = tiny_of(SHAPES[name])
    config: Any = SimpleNamespace(**made.config)
    window = 12 if stages else 0  # the first stage keeps the last tokens, as is assumed
    reference = Counting(made.config, made.weights, pruning(stages, decode=[], window=window))
    for ids, generated in ((made.ids(23), False), ([5], True)):
        reference.work = 0
        reference.forward(ids, generated)
        exact = not stages or not (generated or any(made.config["windows"]))  # else an upper bound
        counted = bare_flops(config, reference.last_pass)
        assert counted >= reference.work * (1 - 1e-12)
        if exact:
            assert counted == pytest.approx(reference.work, rel=1e-12)


@pytest.mark.skipif(tiny.DEVICE != "cpu", reason="rounding on the CPU")
@pytest.mark.parametrize("weights", ["q8", "q4"])
def test_the_router_is_not_rounded(weights: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", replace(SHAPE, dtype="BF16"))
    tables = 2 * SHAPE.vocab * SHAPE.hidden * 34 // 32
    in_blocks = 2 * SHAPE.hidden * SHAPE.head_dim * (SHAPE.n_heads + SHAPE.n_kv_heads)
    in_blocks += SHAPE.n_experts * 3 * SHAPE.hidden * SHAPE.expert_ffn
    in_blocks *= SHAPE.n_layers * {"q8": 34, "q4": 20}[weights]
    routers = 2 * SHAPE.n_layers * SHAPE.n_experts * SHAPE.hidden
    norms = 4 * (SHAPE.n_layers * (2 * SHAPE.hidden + 2 * SHAPE.head_dim) + SHAPE.hidden)
    assert lazyllm.load(folder, device="cpu", weights=weights).core.bytes == tables + in_blocks // 32 + routers + norms


def test_stacked_tensors_are_taken_apart() -> None:
    """Stacks are as in Granite MoE (gate above up) and in GGUF files; others stay, of a wrong rank or size too."""
    prefix = "model.layers.3.block_sparse_moe."
    stacked = [
        Tensor(prefix + "input_linear.weight", "BF16", (2, 6, 4), 1, 1000, 96),
        Tensor(prefix + "output_linear.weight", "BF16", (2, 4, 3), 0, 64, 48),
        Tensor(prefix + "router.layer.weight", "F32", (2, 4), 0, 0, 32),
        Tensor("model.layers.0.mlp.experts.up_proj.weight", "Q8_0", (2, 5, 32), 0, 500, 340),
        Tensor("model.layers.1.mlp.experts.up_proj.weight", "F32", (5, 32), 0, 900, 640),
        Tensor("model.layers.2.mlp.experts.up_proj.weight", "F32", (1 << 60, 0, 1), 0, 900, 0),
        Tensor("model.layers.3.mlp.experts.up_proj.weight", "F32", (0, 2, 1), 0, 900, 0),
    ]
    ours = "model.layers.3.mlp."
    names = FAMILIES["GraniteMoeForCausalLM"].renamed
    ours_stacked = [tensor._replace(name=renamed(tensor.name, names)) for tensor in stacked]
    assert [matrix for tensor in ours_stacked for matrix in unstacked(tensor)] == [
        Tensor(ours + "experts.0.gate_proj.weight", "BF16", (3, 4), 1, 1000, 24),
        Tensor(ours + "experts.0.up_proj.weight", "BF16", (3, 4), 1, 1024, 24),
        Tensor(ours + "experts.1.gate_proj.weight", "BF16", (3, 4), 1, 1048, 24),
        Tensor(ours + "experts.1.up_proj.weight", "BF16", (3, 4), 1, 1072, 24),
        Tensor(ours + "experts.0.down_proj.weight", "BF16", (4, 3), 0, 64, 24),
        Tensor(ours + "experts.1.down_proj.weight", "BF16", (4, 3), 0, 88, 24),
        Tensor(ours + "gate.weight", "F32", (2, 4), 0, 0, 32),
        Tensor("model.layers.0.mlp.experts.0.up_proj.weight", "Q8_0", (5, 32), 0, 500, 170),
        Tensor("model.layers.0.mlp.experts.1.up_proj.weight", "Q8_0", (5, 32), 0, 670, 170),
        *stacked[-3:],
    ]


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", SHAPE)
    checkpoint = Checkpoint(folder)
    missing = "model.layers.2.mlp.experts.4.up_proj.weight"
    tensors = [tensor for tensor in checkpoint.tensors if tensor.name != missing]
    with pytest.raises(lazyllm.CheckpointError, match=f"tensor {missing}: missing from the checkpoint"):
        lazyllm._core.Model(checkpoint.config.core(), checkpoint.shards, tensors)


def test_a_file_of_a_family_without_experts_that_has_some(tmp_path: Path) -> None:
    metadata, tensors = as_gguf("qwen2.5")
    path = write_gguf(tmp_path / "model.gguf", metadata | {"qwen2.expert_count": 8}, tensors)
    words = r"qwen2\.expert_count is 8; expected 0: mixtures of experts are not supported"
    with pytest.raises(lazyllm.CheckpointError, match=words):
        lazyllm.load(path, device="cpu")


def test_a_converted_file_has_the_names_of_the_hub(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", *as_gguf("mixtral"), kind="F16")
    folder = convert(path, tmp_path / "out", "f32", progress=False)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        names = {name for name in file.keys() if ".layers.0." in name and "moe" in name}  # noqa: SIM118
    prefix = "model.layers.0.block_sparse_moe."
    experts = {f"{prefix}experts.{e}.{w}.weight" for e in range(4) for w in ("w1", "w2", "w3")}
    assert names == experts | {prefix + "gate.weight"}
