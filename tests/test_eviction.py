"""SnapKV, ExpectedAttention, any Drop after the last layer: a dense prefill, and fewer tokens afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from comparison import drive
from reference import ExpectedAttentionRule
from test_pruning import SMALL, flops_token_by_token
from tiny import DTYPES, Build, Shape, Tiny, pruning
from tolerances import NEAR_TIE

import lazyllm
from lazyllm import LLM, Drop, ExpectedAttention, Policy, Pruning, Scoring, SnapKV

IDS = [4 + 7 * i % 90 for i in range(120)]
SHAPES = [
    Shape(seed=1, n_layers=4),
    Shape(seed=2, n_layers=3, n_kv_heads=1, windows=(0, 70), qkv_bias=True),
    Shape(seed=3, n_layers=3, n_kv_heads=4, qk_norm=True, query_scalar=11.0, rotary_dim=6, paired_rope=True),
    Shape(seed=4, n_layers=3, rope_scale=1.2, dtype=DTYPES[-1]),
]
CONVERSATION = [(100, False), (1, True), (1, True), (20, False), (1, True), (3, False), (1, True)]


def rules_for(method: Any, tiny: Tiny) -> dict[str, Any]:
    ropes = np.reshape(tiny.config["inv_freq"], (len(tiny.config["rope_scale"]), -1))
    config: Any = SimpleNamespace(**{**tiny.config, "inv_freq": ropes})
    return dict(method.for_prompt(config, 100).core())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"model {shape.seed}")
@pytest.mark.parametrize("keep", [0.3, 0.8])
@pytest.mark.parametrize(("made", "rule"), [(SnapKV, None), (ExpectedAttention, ExpectedAttentionRule)])
def test_sets_and_scores_equal_the_reference(
    tiny_of: Build, made: Any, rule: Any, shape: Shape, keep: float
) -> None:
    tiny = tiny_of(shape)
    reference = drive(tiny, rules_for(made(keep), tiny), CONVERSATION, 5, policy=rule and rule())
    assert reference.margin > NEAR_TIE
    assert len(reference.gone) >= 0.15 * 123


@pytest.mark.parametrize(
    "method", [SnapKV(0.6), ExpectedAttention(0.2), Pruning({5: Drop(0.2)}, scoring=Scoring(layers=3))]
)
def test_the_prefill_is_dense_and_later_passes_attend_to_fewer_tokens(llm: LLM, method: Any) -> None:
    dense, session = llm.session(), llm.session(method)
    assert session.forward(IDS).tobytes() == dense.forward(IDS).tobytes()
    kept = {"SnapKV": 72}.get(type(method).__name__, 24)
    assert session.last_pass.tolist() == [[120, 120, 0]] * 6
    assert (session.computed, session.reached_top) == (1.0, 1.0)
    after = session.forward([5], generated=True)
    assert after.tobytes() != dense.forward([5], generated=True).tobytes()
    assert session.last_pass.tolist() == [[kept + 1, 1, 0]] * 6
    session.forward(IDS[:30])  # of the 150 tokens of prompts the same share
    session.forward([6], generated=True)
    assert (session.last_pass[:, 0] == {72: 90, 24: 30}[kept] + 2).all()


def test_a_share_that_keeps_all_is_dense(llm: LLM) -> None:
    for method in (SnapKV(1.0), ExpectedAttention(1.0)):
        out = llm.generate(IDS, method, max_new_tokens=4)
        assert out.token_ids == llm.generate(IDS, max_new_tokens=4).token_ids
        assert (out.passes["in_play"].reshape(-1, 6) == np.arange(120, 124)[:, None]).all()


def test_a_saved_session_goes_on(llm: LLM, tmp_path: Any) -> None:
    for method in (SnapKV(0.6), ExpectedAttention(0.2)):
        session = llm.session(method)
        session.forward(IDS)
        session.save(tmp_path / "session")
        again = llm.restore(tmp_path / "session")
        assert again.forward(IDS[:9]).tobytes() == session.fork().forward(IDS[:9]).tobytes()


@pytest.mark.parametrize("n", [5, 50])
def test_counted_work(n: int) -> None:
    dense = Pruning().flops(SMALL, n)
    scored = Pruning({SMALL.n_layers - 1: Drop(0.5)}, scoring=Scoring(queries=64, layers=SMALL.n_layers))
    assert SnapKV(0.5).flops(SMALL, n) == flops_token_by_token(scored, SMALL, n, all_score=True)
    assert ExpectedAttention(0.5).flops(SMALL, n) == dense
    assert SnapKV(0.5).speedup(SMALL, n) < 1 == ExpectedAttention(0.5).speedup(SMALL, n)


def test_a_keep_after_the_last_layer_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="layer 5 is out of reach"):
        llm.session(Pruning({5: 0.5}))
    with pytest.raises(ValueError, match="layer 6 is out of reach"):
        llm.session(Pruning({6: Drop(0.5)}))
    with pytest.raises(ValueError, match="can prune after layers 0 to 5"):
        llm.core.session(pruning([(6, 0.5, True)]))
    with pytest.raises(ValueError, match="can prune after layers 0 to 4"):
        llm.core.session(pruning([(5, 0.5)]))


def test_a_policy_sees_no_outputs_of_the_last_layer(llm: LLM) -> None:
    class Outputs(Policy):
        def score(self, view: Any) -> np.ndarray:
            return np.asarray(view.hidden()[:, 0])

    with pytest.raises(ValueError, match="the last layer has an output for the query token alone"):
        llm.session(Outputs({5: Drop(0.5)})).forward(IDS)
    llm.session(Outputs({4: Drop(0.5)})).forward(IDS)


def test_a_method_without_a_model_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"SnapKV\(keep=0.5\) has a schedule for a model only"):
        lazyllm.SnapKV(0.5).core()
