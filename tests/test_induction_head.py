"""The induction head: found in models that have one, and the place of the first stage of a high speedup."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from folders import model_folder
from tiny import Shape

import lazyllm
from lazyllm import LLM, Pruning, Speedup
from lazyllm.calibration.calibrate import candidates
from lazyllm.document import costs
from lazyllm.induction_head import find_induction_head
from lazyllm.searching.space import Space

SHAPE = Shape(vocab=300, context=3000, n_layers=9, hidden=64, n_heads=4, n_kv_heads=2, head_dim=32, ffn=64, seed=4)
PROMPT = np.random.default_rng(0).integers(0, 300, 500).tolist()
HEAD = (0, 2)  # layer and head; its key head is 1


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
    assert find_induction_head(lazyllm.load(llm.checkpoint.path, threads=1, weights="q8", kv="f16")) == HEAD


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, context=280),  # too short to probe
        replace(SHAPE, n_layers=2),  # the usual first stage stands at layer 0
    ],
    ids=["context", "two layers"],
)
def test_no_head_where_none_could_score(shape: Shape, tmp_path: Path) -> None:
    assert find_induction_head(planted(tmp_path / "model", shape)) is None


def test_no_head_of_a_layer_that_does_not_see_the_whole_context(llm: LLM) -> None:
    other = lazyllm.load(llm.checkpoint.path, threads=1)
    other.config = replace(other.config, windows=(64, 64, 0) * 3)
    assert find_induction_head(other) is None


def test_no_head_without_repeated_attention(tmp_path: Path) -> None:
    assert find_induction_head(planted(tmp_path / "model", sharpness=0.0)) is None


def test_the_first_stage_of_a_high_speedup_stands_there_and_is_scored_by_it(llm: LLM) -> None:
    pruning = Pruning.for_speedup(3.0, llm, 2000)
    assert [layer for layer, _ in pruning.stages] == [0, 2, 4, 6]
    assert pruning.scoring.head == HEAD
    assert 3.0 <= pruning.speedup(llm.config, 2000) <= 3.03
    answer = llm.generate(PROMPT, 3.0, max_new_tokens=2)
    assert answer.pruning.scoring.head == HEAD
    assert Pruning.for_speedup(3.0, llm.config, 2000).scoring.head is None  # weights tell, a configuration does not
    assert Pruning.for_speedup(3.0, llm, 2000, scoring="paper").scoring.head is None


def test_whatever_takes_a_number_has_the_stages_of_that_head(llm: LLM, tmp_path: Path) -> None:
    session = llm.session(3.0)
    session.read(PROMPT[:300])
    session.save(tmp_path / "read")
    stages = Pruning.for_speedup(3.0, llm, len(PROMPT)).stages
    for begun in (session, llm.restore(tmp_path / "read", progress=False)):
        begun.forward(PROMPT[300:])
        assert begun.pruning.stages == stages
    session.save(tmp_path / "asked")
    assert llm.restore(tmp_path / "asked", progress=False).pruning.stages == stages
    assert costs(llm, Speedup(3.0), 500)[0] < 0.15  # reading a document computes one layer of nine
    assert next(candidates(3.0, llm.config_for(3.0), 1000)) == Pruning.for_speedup(3.0, llm, 1000)
    starts = (start["stages"] for start in Space(llm.config_for(3.0), 1000, 2.0, 3.0).starts())
    assert list(starts) == [3, 4, 4, 4, 4]
    options = {"datasets": ["niah_single_1"], "limit": 1, "max_length": 1500, "tokens": 2, "warm_ups": 0}
    lazyllm.sweep(llm, [8.0], **options, progress=False)  # out of reach without the head


def test_a_low_speedup_does_not_ask(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: LLM) -> None:
        raise AssertionError("the model was probed")

    other = lazyllm.load(llm.checkpoint.path, threads=1)
    monkeypatch.setattr("lazyllm.llm.find_induction_head", refuse)
    for setting in (None, 2.0, "2.2x", {3: 0.5}):
        other.generate(PROMPT, setting, max_new_tokens=2)
    with pytest.raises(AssertionError, match="probed"):
        other.generate(PROMPT, 2.3, max_new_tokens=2)
