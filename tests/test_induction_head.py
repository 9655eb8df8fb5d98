"""The induction head: found in models that have one, and the place of the first stage of a high speedup."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from folders import model_folder
from tiny import Shape

import lazyllm
from lazyllm import LLM, Pruning
from lazyllm.induction_head import find_induction_head

SHAPE = Shape(vocab=300, context=3000, n_layers=9, hidden=64, n_heads=4, n_kv_heads=2, head_dim=32, seed=4)
HEAD = (1, 2)  # layer and head; its key head is 1


def planted(folder: Path, shape: Shape = SHAPE, sharpness: float = 10.0) -> LLM:
    """A model of which one head attends to earlier tokens with the query's own id. It compares in dimensions that RoPE
    hardly turns in a few hundred positions."""
    slow = [dim for dim in range(32) if dim % 16 >= 10]
    compared = np.zeros((32, 64))
    compared[slow] = np.random.default_rng(1).normal(0, 64**-0.5, (len(slow), 64))
    names = [f"model.layers.{HEAD[0]}.self_attn.{part}_proj.weight" for part in "qk"]
    q, k = (np.random.default_rng(2).normal(0, 0.02, (heads * 32, 64)) for heads in (4, 2))
    q[HEAD[1] * 32 :][:32] = sharpness * compared
    k[32:] = sharpness * compared
    return lazyllm.load(model_folder(folder, shape, changed=dict(zip(names, (q, k), strict=True))), threads=1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return planted(tmp_path_factory.mktemp("planted"))


def test_the_head_is_found_whatever_the_precision(llm: LLM) -> None:
    assert find_induction_head(llm) == HEAD
    assert find_induction_head(lazyllm.load(llm.checkpoint.path, threads=1, kv="f16")) == HEAD


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, context=280),  # too short to probe
        replace(SHAPE, n_layers=4),  # the usual first stage stands at the head's layer
        replace(SHAPE, n_layers=2),  # it stands at layer 0
    ],
    ids=["context", "stage", "two layers"],
)
def test_no_head_where_none_could_score(shape: Shape, tmp_path: Path) -> None:
    assert find_induction_head(planted(tmp_path / "model", shape)) is None


def test_no_head_of_a_layer_that_does_not_see_the_whole_context(llm: LLM) -> None:
    other = lazyllm.load(llm.checkpoint.path, threads=1)
    other.config = replace(other.config, windows=(0, 64, 0) * 3)
    assert find_induction_head(other) is None


def test_no_head_without_repeated_attention(tmp_path: Path) -> None:
    assert find_induction_head(planted(tmp_path / "model", sharpness=0.0)) is None


def test_the_first_stage_of_a_high_speedup_stands_there_and_is_scored_by_it(llm: LLM) -> None:
    pruning = Pruning.for_speedup(3.0, llm, 2000)
    assert [layer for layer, _ in pruning.stages] == [1, 2, 4, 6]
    assert pruning.scoring.head == HEAD
    assert 3.0 <= pruning.speedup(llm.config, 2000) <= 3.03
    answer = llm.generate(np.random.default_rng(0).integers(0, 300, 500).tolist(), 3.0, max_new_tokens=2)
    assert answer.pruning.scoring.head == HEAD
    assert Pruning.for_speedup(3.0, llm.config, 2000).scoring.head is None  # weights tell, a configuration does not
    assert Pruning.for_speedup(3.0, llm, 2000, scoring="paper").scoring.head is None


def test_a_low_speedup_does_not_ask(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: LLM) -> None:
        raise AssertionError("the model was probed")

    other = lazyllm.load(llm.checkpoint.path, threads=1)
    monkeypatch.setattr("lazyllm.llm.find_induction_head", refuse)
    prompt = np.random.default_rng(0).integers(0, 300, 500).tolist()
    for setting in (None, 2.0, "2.2x", {3: 0.5}):
        other.generate(prompt, setting, max_new_tokens=2)
    with pytest.raises(AssertionError, match="probed"):
        other.generate(prompt, 2.3, max_new_tokens=2)
