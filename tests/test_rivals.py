"""FastKV, CLAA, GemFilter, SnapKV, ExpectedAttention: the reference, counted work, and what they refuse."""

import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from comparison import drive
from folders import IDS
from reference import Reference
from reference_rivals import CLAARule, ExpectedAttentionRule, FastKVRule, GemFilterRule
from test_pruning import SMALL, flops_token_by_token
from tiny import DTYPES, Build, Shape, Tiny, build, pruning, random_weights
from tolerances import NEAR_TIE

from lazyllm import (
    CLAA,
    LLM,
    Drop,
    ExpectedAttention,
    FastKV,
    GemFilter,
    PromptCompression,
    Pruning,
    SnapKV,
    StaticPruning,
)
from lazyllm.methods.rivals import Aggregation, Chosen, FirstPass
from lazyllm.scoring import Scoring

LONG = [4 + 7 * i % 90 for i in range(120)]
SHAPES = [
    Shape(seed=1, n_layers=6),
    Shape(seed=2, n_layers=6, n_kv_heads=1, windows=(0, 9), qkv_bias=True),
    Shape(seed=3, n_layers=6, n_kv_heads=4, qk_norm=True, query_scalar=11.0),
    Shape(seed=4, n_layers=6, windows=(60, 0), dtype=DTYPES[-1]),
]
CONVERSATION = [(60, False), (1, True), (1, True), (20, False), (1, True), (3, False), (1, True)]
ROPES = [
    Shape(seed=1, n_layers=4),
    Shape(seed=2, n_layers=3, n_kv_heads=1, windows=(0, 70), local_theta=50.0, qkv_bias=True),
    Shape(seed=3, n_layers=3, n_kv_heads=4, qk_norm=True, query_scalar=11.0, rotary_dim=6, paired_rope=True),
    Shape(seed=4, n_layers=3, rope_scale=1.2, dtype=DTYPES[-1]),
    Shape(seed=5, n_layers=3, short_context=110),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"model {shape.seed}")
@pytest.mark.parametrize(("layer", "keep"), [(0, 0.25), (2, 0.6), (4, 0.25)])
@pytest.mark.parametrize(("made", "rule"), [(FastKV, FastKVRule), (CLAA, CLAARule)])
def test_sets_and_scores_equal_the_reference(
    tiny_of: Build, made: Any, rule: Any, shape: Shape, layer: int, keep: float
) -> None:
    method = made(layer, keep)
    assert drive(tiny_of(shape), method.core(), CONVERSATION, 5, policy=rule()).margin > NEAR_TIE


@pytest.mark.parametrize("made", [FastKV, CLAA])
@pytest.mark.parametrize("n", [1, 8, 9, 10])
def test_the_last_eight_stay_however_short_the_prompt(llm: LLM, made: Any, n: int) -> None:
    session = llm.session(made(2, 0.01))
    assert np.isfinite(session.forward(IDS[:n])).all()
    assert session.last_pass[:, 0].tolist() == [n] * 3 + [min(n, 8)] * 3


def test_claa_compares_heads_by_their_own_spread() -> None:
    """A key-value head with a hundredth of the others' attention counts as they do; one that attends to all
    tokens equally counts as 0."""
    attention = np.random.default_rng(0).random((4, 8, 30))
    protected = np.arange(30) >= 22

    def scores_of(weights: np.ndarray) -> np.ndarray:
        keys = np.zeros((2, 30, 3))
        view: Any = SimpleNamespace(protected=protected, attention=lambda rows: weights, keys=lambda: keys)
        return Aggregation({2: 0.5}).observe(view)

    want = scores_of(attention)
    scale = np.array([1.0, 1.0, 0.01, 0.01])[:, None, None]  # the second head's two query heads
    assert scores_of(attention * scale) == pytest.approx(want, abs=1e-5)
    assert scores_of(np.zeros_like(attention)).tolist() == [0.0] * 30
    assert not want[protected].any()


@pytest.mark.parametrize("n", [5, 9, 50])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_counted_work_of_one_stage(n: int, layer: int) -> None:
    single, four = (Pruning({layer: 0.3}, scoring=Scoring(queries=8, layers=layers), window=8) for layers in (1, 4))
    assert FastKV(layer, 0.3).flops(SMALL, n) == flops_token_by_token(single, SMALL, n)
    assert CLAA(layer, 0.3).flops(SMALL, n) == flops_token_by_token(four, SMALL, n, all_score=True)


class Reader:
    """The part of an LLM that GemFilter uses, on a tiny model."""

    def __init__(self, tiny: Tiny) -> None:
        self.config = SimpleNamespace(context=tiny.shape.context)
        self._model = tiny.load()

    def session(self, method: Any) -> Any:
        core = self._model.session(method.core())
        self.opened = core
        return SimpleNamespace(forward=lambda ids, progress: core.forward(ids))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"model {shape.seed}")
@pytest.mark.parametrize(("layer", "keep"), [(0, 0.25), (2, 0.02), (2, 0.6), (4, 0.25)])
def test_the_filtered_prompt_equals_the_references(tiny_of: Build, shape: Shape, layer: int, keep: float) -> None:
    tiny, rule = tiny_of(shape), GemFilterRule()
    ids = list(range(70))
    Reference(tiny.config, tiny.weights, pruning([(layer, keep)]), rule).forward(ids)
    assert rule.margin > NEAR_TIE
    assert len(rule.chosen) == math.ceil(keep * 70)
    reader = Reader(tiny)
    assert GemFilter(layer, keep).ids(reader, ids, 0) == rule.chosen
    assert reader.opened.length == 0  # the first pass ended at its layer


def test_each_prompt_of_a_conversation_is_filtered_by_itself(llm: LLM) -> None:
    method = GemFilter(1, 0.5)
    session = llm.session(method)
    session.forward(IDS)
    again = session.ask(IDS[:20], max_new_tokens=2)
    assert again.prompt_ids == method.ids(llm, IDS[:20], 0)
    assert session.length == 25 + 10 + 1


@pytest.mark.parametrize(
    ("method", "where", "result"),
    [
        (GemFilter(2, 0.3), "lazyllm.methods.rivals.FirstPass.score", Chosen(np.arange(15))),
        (PromptCompression(0.5), "lazyllm.methods.compression.PromptCompression.compress", "The sea."),
    ],
    ids=["GemFilter", "PromptCompression"],
)
def test_work_before_the_model_counts_in_the_time_of_the_first_token(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, method: Any, where: str, result: Any
) -> None:
    clock, ahead = time.perf_counter, [0.0]

    def slow(*_: object) -> Any:
        ahead[0] += 100
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead[0])
    monkeypatch.setattr(where, slow)
    out = llm.generate("The sea was calm." if method.compresses else IDS, method, max_new_tokens=2)
    assert out.seconds > out.ttft >= 100
    assert out.tokenize_seconds < 100


def test_gemfilter_that_keeps_everything_is_dense() -> None:
    assert GemFilter(2, 1.0).ids(None, IDS, 0) == IDS
    assert GemFilter(2, 0.99).ids(None, IDS, 0) == IDS  # 49.5, rounded up
    assert GemFilter(2, 0.99).flops(SMALL, 50) == Pruning().flops(SMALL, 50)


@pytest.mark.parametrize("n", [5, 50])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_counted_work_of_both_passes(n: int, layer: int) -> None:
    c, width = SMALL, SMALL.n_heads * SMALL.head_dim
    first = 2 * width * n
    for passed in range(layer + 1):
        for i in range(n):
            first += 2 * 2 * c.hidden * c.n_kv_heads * c.head_dim
            if passed == layer:
                continue
            first += (
                2 * 2 * c.hidden * width + 2 * 3 * c.hidden * c.ffn + 4 * width * min(i + 1, c.windows[passed] or n)
            )
    second = flops_token_by_token(Pruning(), c, math.ceil(0.3 * n))
    assert GemFilter(layer, 0.3).flops(c, n) == first + second


def test_a_prompt_too_long_for_the_first_pass_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="601 given and 0 to be generated make 601 tokens; the model's context is 600"):
        llm.session(GemFilter(2, 0.1)).forward([5] * 601)
    assert len(llm.generate([5] * 600, GemFilter(2, 0.1), max_new_tokens=1).prompt_ids) == 60


def test_a_score_that_is_no_number_is_an_error() -> None:
    view: Any = SimpleNamespace(
        layer=2, n_keep=2, keys=lambda: np.full((1, 4, 2), np.inf), queries=lambda: np.ones((2, 1, 2))
    )
    with pytest.raises(ValueError, match="a score of layer 2 is no finite number"):
        FirstPass({2: 0.5}).score(view)


@pytest.mark.parametrize("made", [FastKV, CLAA, GemFilter, StaticPruning])
def test_a_model_too_shallow_says_so(llm: LLM, made: Any) -> None:
    words = "layer 5 is out of reach: it must be below 5"
    with pytest.raises(ValueError, match=words):
        llm.session(made(5, 0.5))
    with pytest.raises(ValueError, match=words):
        made(5, 0.5).flops(llm.config, 100)
    llm.session(made(4, 0.5)).forward(IDS)


# ---- a dense prefill, and fewer tokens afterwards ------------------------------------------------------

EVICTING = [(100, False), (1, True), (1, True), (20, False), (1, True), (3, False), (1, True)]


def rules_for(method: Any, tiny: Tiny) -> dict[str, Any]:
    ropes = np.reshape(tiny.config["inv_freq"], (len(tiny.config["rope_scale"]), -1))
    config: Any = SimpleNamespace(**{**tiny.config, "inv_freq": ropes})
    return dict(method.for_prompt(config, 100).core())


@pytest.mark.parametrize("shape", ROPES, ids=lambda shape: f"model {shape.seed}")
@pytest.mark.parametrize("keep", [0.3, 0.8])
@pytest.mark.parametrize(("made", "rule"), [(SnapKV, None), (ExpectedAttention, ExpectedAttentionRule)])
def test_what_follows_the_prompt_equals_the_reference(
    tiny_of: Build, made: Any, rule: Any, shape: Shape, keep: float
) -> None:
    tiny = tiny_of(shape)
    reference = drive(tiny, rules_for(made(keep), tiny), EVICTING, 5, policy=rule and rule())
    assert reference.margin > NEAR_TIE
    assert len(reference.gone) >= 0.15 * 123


@pytest.mark.parametrize(
    "method", [SnapKV(0.6), ExpectedAttention(0.2), Pruning({5: Drop(0.2)}, scoring=Scoring(layers=3))]
)
def test_the_prefill_is_dense_and_later_passes_attend_to_fewer_tokens(llm: LLM, method: Any) -> None:
    dense, session = llm.session(), llm.session(method)
    assert session.forward(LONG).tobytes() == dense.forward(LONG).tobytes()
    kept = {"SnapKV": 72}.get(type(method).__name__, 24)
    assert session.last_pass.tolist() == [[120, 120, 0]] * 6
    assert (session.computed, session.reached_top) == (1.0, 1.0)
    after = session.forward([5], generated=True)
    assert after.tobytes() != dense.forward([5], generated=True).tobytes()
    assert session.last_pass.tolist() == [[kept + 1, 1, 0]] * 6
    session.forward(LONG[:30])  # of the 150 tokens of prompts the same share
    session.forward([6], generated=True)
    assert (session.last_pass[:, 0] == {72: 90, 24: 30}[kept] + 2).all()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("method", [SnapKV(0.6), ExpectedAttention(0.2), Pruning({5: Drop(0.2)}, decode={})])
def test_what_follows_the_last_layer_is_reported(llm: LLM, method: Any, tokens: int) -> None:
    out = llm.generate(LONG, method, max_new_tokens=tokens, trace=True)
    assert out.unpruned == ""
    assert out.speedup == method.speedup(llm.config, 120)
    (stage,) = out.trace.stages
    session = llm.session(method)
    session.forward(LONG)
    assert (stage.layer, stage.in_play.tolist()) == (5, list(range(120)))
    assert stage.kept.tolist() == np.flatnonzero(session.core.gone == 0).tolist()
    frame = out.trace.to_frame()
    assert (len(frame), frame["kept"].sum()) == (120, stage.kept.size)


def test_a_share_that_keeps_all_is_dense(llm: LLM) -> None:
    for method in (SnapKV(1.0), ExpectedAttention(1.0)):
        out = llm.generate(LONG, method, max_new_tokens=4)
        assert out.token_ids == llm.generate(LONG, max_new_tokens=4).token_ids
        assert (out.passes["in_play"].reshape(-1, 6) == np.arange(120, 124)[:, None]).all()
        assert (out.speedup, bool(out.unpruned)) == (1.0, True)


@pytest.mark.filterwarnings("error")  # of NumPy
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_an_expectation_that_is_no_number_is_an_error(tmp_path: Any, name: str) -> None:
    shape, tensor = Shape(n_layers=2), f"model.layers.1.self_attn.{name}.weight"
    weight = random_weights(shape)[tensor]
    weight[0, 0] = np.inf
    damaged = build(shape, tmp_path, {tensor: weight})
    session = damaged.load().session(rules_for(ExpectedAttention(0.5), damaged))
    with pytest.raises(ValueError, match="gave position 4 the score nan"):
        session.forward(LONG[:30])
    assert session.length == 0


@pytest.mark.parametrize("n", [5, 50, 100])
def test_counted_work_of_eviction(n: int) -> None:
    dense = Pruning().flops(SMALL, n)
    scored = Pruning({SMALL.n_layers - 1: Drop(0.5)}, scoring=Scoring(queries=64, layers=SMALL.n_layers))
    assert SnapKV(0.5).flops(SMALL, n) == flops_token_by_token(scored, SMALL, n, all_score=True)
    assert ExpectedAttention(0.5).flops(SMALL, n) == dense
    assert SnapKV(0.5).speedup(SMALL, n) < 1 == ExpectedAttention(0.5).speedup(SMALL, n)


def test_a_method_without_a_model_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"SnapKV\(keep=0.5\) has a schedule for a model only"):
        SnapKV(0.5).core()
