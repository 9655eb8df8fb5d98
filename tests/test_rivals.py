"""FastKV, CLAA and GemFilter: against the reference, their counted work, and what they refuse."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from comparison import drive
from reference import CLAARule, FastKVRule, GemFilterRule, Reference
from test_pruning import SMALL, flops_token_by_token
from tiny import DTYPES, Build, Shape, Tiny, pruning
from tolerances import NEAR_TIE

from lazyllm import CLAA, LLM, FastKV, GemFilter, PromptCompression, Pruning, StaticPruning
from lazyllm.methods.rivals import Aggregation, Chosen, FirstPass
from lazyllm.scoring import Scoring

IDS = list(range(40, 90))
TEXT = "The sea was calm. Nobody saw the boat!"
SHAPES = [
    Shape(seed=1, n_layers=6),
    Shape(seed=2, n_layers=6, n_kv_heads=1, windows=(0, 9), qkv_bias=True),
    Shape(seed=3, n_layers=6, n_kv_heads=4, qk_norm=True, query_scalar=11.0),
    Shape(seed=4, n_layers=6, windows=(60, 0), dtype=DTYPES[-1]),
]
CONVERSATION = [(60, False), (1, True), (1, True), (20, False), (1, True), (3, False), (1, True)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"model {shape.seed}")
@pytest.mark.parametrize(("layer", "keep"), [(0, 0.25), (2, 0.6), (4, 0.25)])
@pytest.mark.parametrize(("made", "rule"), [(FastKV, FastKVRule), (CLAA, CLAARule)])
def test_sets_and_scores_equal_the_reference(
    tiny_of: Build, made: Any, rule: Any, shape: Shape, layer: int, keep: float
) -> None:
    method = made(layer, keep)
    assert drive(tiny_of(shape), method.core(), CONVERSATION, 5, policy=rule()).margin > NEAR_TIE


@pytest.mark.parametrize("made", [FastKV, CLAA])
def test_answers_bring_nothing_back(llm: LLM, made: Any) -> None:
    out = llm.generate(IDS, made(2, 0.3), max_new_tokens=4, trace=True)
    assert out.passes["in_play"].reshape(-1, 6)[:2].tolist() == [[50] * 3 + [15] * 3, [51] * 3 + [16] * 3]
    assert not out.passes["revived"].any()
    assert set(range(42, 50)) <= set(out.trace.stages[0].kept.tolist())
    assert out.computed == pytest.approx((3 * 50 + 3 * 15) / 300)


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
    one, four = (
        Pruning({layer: 0.3}, scoring=Scoring(queries=8, layers=layers), window=8) for layers in (1, 4)
    )
    assert FastKV(layer, 0.3).flops(SMALL, n) == flops_token_by_token(one, SMALL, n)
    assert CLAA(layer, 0.3).flops(SMALL, n) == flops_token_by_token(four, SMALL, n, all_score=True)


@pytest.mark.parametrize("method", [FastKV(2, 0.3), CLAA(2, 0.3), GemFilter(2, 0.3)])
def test_counts_after_a_run_are_those_before(llm: LLM, method: Any) -> None:
    session = llm.session(method)
    session.forward(IDS)
    flops = method.prefill_flops(llm.config, len(IDS), session.last_pass)
    assert flops == method.flops(llm.config, len(IDS))
    assert method.speedup(llm.config, len(IDS)) == Pruning().flops(llm.config, len(IDS)) / flops


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
def test_the_filtered_prompt_equals_the_references(
    tiny_of: Build, shape: Shape, layer: int, keep: float
) -> None:
    tiny, rule = tiny_of(shape), GemFilterRule()
    ids = list(range(70))
    Reference(tiny.config, tiny.weights, pruning([(layer, keep)]), rule).forward(ids)
    assert rule.margin > NEAR_TIE
    assert len(rule.chosen) == math.ceil(keep * 70)
    reader = Reader(tiny)
    assert GemFilter(layer, keep).ids(reader, ids, 0) == rule.chosen
    assert reader.opened.length == 0  # the first pass ended at its layer


def test_gemfilter_reads_the_filtered_prompt_densely(llm: LLM) -> None:
    method = GemFilter(2, 0.3)
    out = llm.generate(IDS, method, max_new_tokens=5)
    shorter = method.ids(llm, IDS, 0)
    assert len(shorter) == 15
    assert out.prompt_ids == shorter
    plain = llm.generate(shorter, max_new_tokens=5)
    assert (out.token_ids, out.passes.tolist()) == (plain.token_ids, plain.passes.tolist())
    assert (out.n_given, out.computed, out.reached_top) == (50, pytest.approx(0.3), pytest.approx(0.3))


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
    out = llm.generate(TEXT if method.compresses else IDS, method, max_new_tokens=2)
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
            first += 2 * 2 * c.hidden * c.n_kv_heads * c.head_dim + 2 * 2 * c.hidden * width
            first += 2 * 3 * c.hidden * c.ffn + 4 * width * min(i + 1, c.windows[passed] or n)
    second = flops_token_by_token(Pruning(), c, math.ceil(0.3 * n))
    assert GemFilter(layer, 0.3).flops(c, n) == first + second


def test_a_prompt_too_long_for_the_first_pass_is_refused_before_work(llm: LLM) -> None:
    told = "GemFilter reads all 601 tokens first; the context has 600"
    long = [5] * 601
    with pytest.raises(ValueError, match=f"prompt 1: {told}") as caught:
        llm.generate([IDS, long], GemFilter(2, 0.1), max_new_tokens=1)
    assert caught.value.finished == []  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=told):
        llm.session(GemFilter(2, 0.1)).forward(long)
    assert len(llm.generate(long[1:], GemFilter(2, 0.1), max_new_tokens=1).prompt_ids) == 60


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
