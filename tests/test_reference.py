"""Tests the reference with hand-worked cases; test_families.py compares its dense passes."""

import math
from typing import Any

import numpy as np
import pytest
from reference import Reference, levelled
from tiny import Shape, Tiny, build, pruning

RULES = Shape(n_layers=4, hidden=16, n_heads=2, n_kv_heads=1, head_dim=8, ffn=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build(RULES, tmp_path_factory.mktemp("tiny"))


def start(model: Tiny, stages: Any = (), **options: Any) -> Reference:
    return Reference(model.config, model.weights, pruning(stages, **options))


def selecting(kinds: str, **options: Any) -> Reference:
    """A session without a model, to call `select` with given scores; kinds: p prompt, g generated token."""
    reference = Reference({"n_layers": 4}, {}, pruning(**options))
    reference.kinds = ["pg".index(kind) for kind in kinds]
    reference.depths = [1] * len(kinds)
    return reference


def choose(reference: Reference, rule: Any, scores: list[float]) -> list[int]:
    return reference.select(rule, list(range(len(scores))), np.array(scores))


def kept(reference: Reference) -> list[int]:
    """The tokens in play in the last layer of the last pass."""
    return reference.last_trace[-1]["in_play"]


@pytest.mark.parametrize(
    ("keep", "n", "count"),
    [
        *((0.1, 30, 3), (0.1, 31, 4), (0.55, 100, 56), (0.07, 100, 8)),
        *((0.29, 100, 29), (0.7, 10, 7), (1.0, 9, 9), (1e-9, 9, 1)),
    ],
)
def test_count_is_the_ceiling_of_the_double_product(keep: float, n: int, count: int) -> None:
    scores = np.random.default_rng(0).random(n)
    assert len(choose(selecting("p" * n), keep, scores.tolist())) == count == math.ceil(keep * n)


def test_count_refers_to_all_prompt_tokens_not_to_those_in_play() -> None:
    reference = selecting("p" * 10)
    assert reference.select(0.3, [1, 2, 5, 6, 9], np.array([5.0, 4.0, 3.0, 2.0, 1.0])) == [1, 2, 9]
    assert reference.select(0.7, [1, 2, 5, 6, 9], np.array([5.0, 4.0, 3.0, 2.0, 1.0])) == [1, 2, 5, 6, 9]


def test_margin_is_the_relative_gap_at_the_cut_or_the_distance_to_a_mass() -> None:
    reference = selecting("pppppp")
    choose(reference, 0.5, [9.0, 8.0, 6.0, 1.0, 1.0, 1.0])
    assert reference.margin == pytest.approx(0.25)
    choose(reference, 1.0, [1.0] * 6)
    assert reference.margin == pytest.approx(0.25)
    reference = selecting("p" * 5)
    choose(reference, (0.45, 0.0, 1.0), [40.0, 30.0, 20.0, 10.0, 0.0])
    assert reference.margin == pytest.approx(0.05)


def test_nan_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        choose(selecting("ppp"), 0.5, [1.0, math.nan, 0.0])


MASS = [10.0, 40.0, 20.0, 15.0, 5.0, 5.0, 5.0, 0.0]
SELECTED: list[tuple[str, Any, list[float], list[int], dict[str, Any]]] = [
    # kinds, rule, scores, tokens kept, options; generated tokens stay and are not counted, unless asked for
    ("ppppggg", 0.5, [3.0, 1.0, 4.0, 2.0, 0.0, 0.0, 0.0], [0, 2, 4, 5, 6], {}),
    ("ppgpp", 0.5, [3.0, 4.0, 0.0, 5.0, 0.0], [2, 3, 4], {}),
    ("ppppggg", 0.5, [3.0, 1.0, 4.0, 2.0, 0.5, 2.5, 0.0], [0, 2, 5, 6], {"prune_generated": True}),
    # ties go to the smaller position
    ("pppppp", 0.5, [1.0] * 6, [0, 1, 5], {}),
    ("pppppp", 0.5, [1.0, 2.0, 1.0, 2.0, 2.0, 0.0], [1, 3, 5], {}),
    # tokens that are always kept may exceed the budget, and count towards it
    ("p" * 10, 0.1, [0.0] * 10, [0, 1, 4, 5, 7, 8, 9], {"sink": 2, "window": 3, "protect": [(4, 6)]}),
    ("p" * 10, 0.3, [0.0, 1.0, 2.0, 9.0, 3.0, 1.0, 1.0, 1.0, 1.0, 0.0], [0, 3, 9], {"sink": 1}),
    ("gpgppgpgg", 0.01, [0.0] * 9, [1, 4, 6, 8], {"sink": 1, "window": 2, "prune_generated": True}),
    ("ppp", 0.1, [0.0] * 3, [0, 1, 2], {"window": 5}),
    ("pppp", 0.1, [0.0] * 4, [1, 3], {"protect": [(1, 2), (9, 12)]}),
    # a mass is taken until its share is reached
    ("p" * 8, (0.5, 0.0, 1.0), MASS, [1, 2, 7], {}),  # 0 (query) + 40 + 20 of 100
    ("p" * 8, (0.4, 0.0, 1.0), MASS, [1, 7], {}),  # reached exactly
    ("p" * 8, (0.61, 0.0, 1.0), MASS, [1, 2, 3, 7], {}),
    ("p" * 8, (0.5, 0.55, 1.0), MASS, [0, 1, 2, 3, 7], {}),  # at least 5, in order of position
    ("p" * 8, (0.9, 0.0, 0.25), MASS, [1, 7], {}),  # at most 2
    ("p" * 8, (1e-6, 0.0, 1.0), MASS, [1, 7], {}),
    # of prompt tokens only, those that are always kept first
    ("p" * 8, (0.1, 0.0, 0.25), [0.0, 9.0] + [1.0] * 6, [0, 4, 5, 6, 7], {"sink": 1, "window": 4}),
    ("p" * 5, (0.6, 0.0, 1.0), [30.0, 10.0, 40.0, 20.0, 0.0], [0, 2, 4], {"sink": 1}),
    ("p" * 5, (0.3, 0.0, 1.0), [30.0, 10.0, 40.0, 20.0, 0.0], [0, 4], {"sink": 1}),
    ("pppgg", (0.5, 0.0, 1.0), [2.0, 1.0, 1.0, 90.0, 5.0], [0, 3, 4], {}),
]


@pytest.mark.parametrize(("kinds", "rule", "scores", "want", "options"), SELECTED)
def test_selections_by_hand(
    kinds: str, rule: Any, scores: list[float], want: list[int], options: dict[str, Any]
) -> None:
    assert choose(selecting(kinds, **options), rule, scores) == want


def test_smooth_averages_over_neighbours_in_play_and_over_fewer_at_the_ends() -> None:
    reference = selecting("p" * 5, smooth=3)
    row = np.array([[1.0, 2.0, 6.0, 4.0, 5.0], [3.0, 4.0, 8.0, 6.0, 7.0]])  # two heads; mean 2 3 7 5 6
    raw = reference.attention({4: row}, [4], 0, 4)
    assert reference.smooth(raw) == pytest.approx([2.5, 4.0, 5.0, 6.0, 5.5])


def test_queries_averages_the_last_new_rows_that_are_computed() -> None:
    rows = {i: np.full((1, 4), float(i)) for i in (2, 7, 8, 9)}  # token 2 is revived, the others are new
    reference = selecting("p" * 10, queries=2)
    assert reference.attention(rows, [2, 7, 8, 9], 0, 7) == pytest.approx([8.5] * 4)
    reference = selecting("p" * 10, queries=9)
    assert reference.attention(rows, [2, 7, 8, 9], 0, 7) == pytest.approx([8.0] * 4)


def test_pooling_rms_takes_the_largest_of_the_rows() -> None:
    rows = {8: np.array([[0.1, 0.9], [0.3, 0.7]]), 9: np.array([[0.4, 0.6], [0.4, 0.6]])}
    reference = selecting("p" * 10, queries=2, pooling="rms")
    assert reference.attention(rows, [8, 9], 0, 8) == pytest.approx([0.4, 0.65**0.5])


@pytest.mark.parametrize(
    ("pooling", "power", "want"),
    [("mean", 1, [0.9, 0.85, 0.8, 0.85, 1.1]), ("rms", 0.5, [1.3, 1.285, 1.28, 1.285, 1.46])],
)
def test_the_attention_of_one_head_is_levelled_and_counts_eight_times(
    pooling: str, power: float, want: list[float]
) -> None:
    """Each of the first four of the five tokens seen has a fifth, and so has the block of the last."""
    rows = {9: np.array([[0.2, 0.1, 0.0, 0.1, 0.6], [0.2, 0.2, 0.3, 0.2, 0.1]])}
    reference = selecting("p" * 10, pooling=pooling, head=(2, 1))
    plain = selecting("p" * 10, pooling=pooling).attention(rows, [9], 2, 9)
    assert reference.attention(rows, [9], 2, 9) == pytest.approx(np.power(want, power))
    assert reference.attention(rows, [9], 1, 9) == pytest.approx(plain)


def test_levelled_attention_falls_within_blocks_only() -> None:
    """Tokens 0 to 5 are not seen, the block of the last has two."""
    row = np.concatenate([np.zeros(6), np.full(506, 0.5 / 506), [0.4, 0.1]])
    got = levelled(row)
    assert got[:6].tolist() == [0] * 6
    assert got[6:512] == pytest.approx(np.full(506, 1 / 508))
    assert got[512:] == pytest.approx([1.6 / 508, 0.4 / 508])


def test_scores_over_layers_leave_out_tokens_that_never_leave_play() -> None:
    """Position 0 is a sink, 2 is generated, 4 is the query token."""
    reference = selecting("ppgpp", sink=1)
    scores = reference.droppable(np.array([0.4, 0.1, 0.1, 0.3, 0.1]), [0, 1, 2, 3, 4])
    assert scores == {0: 0.0, 1: 0.1, 2: 0.0, 3: 0.3, 4: 0.0}


def test_remembered_scores_fade_with_every_decode_step() -> None:
    reference = selecting("ppp", memory=0.5)
    assert reference.recall(1, [0, 1, 2], np.array([0.8, 0.2, 0.4])).tolist() == [0.8, 0.2, 0.4]
    assert reference.recall(1, [0, 2], np.array([0.1, 0.3])).tolist() == [0.4, 0.3]
    assert reference.recall(1, [0, 1, 2], np.array([0.1, 0.1, 0.1])).tolist() == [0.2, 0.1, 0.15]
    assert reference.recall(2, [0], np.array([0.1])).tolist() == [0.1]


def test_a_prompt_forgets_what_every_stage_remembered(model: Tiny) -> None:
    reference = start(model, [(2, 0.5)], memory=0.5, decode=[(0, (0.5, 0.0, 1.0)), (2, (0.5, 0.0, 1.0))])
    ids = model.ids(20)
    reference.forward(ids[:12])
    reference.forward(ids[12:13], generated=True)
    assert set(reference.remembered) == {0, 2}
    reference.forward(ids[13:])
    assert set(reference.remembered) == {2}  # no stage of a prompt follows layer 0


def test_depths_by_hand(model: Tiny) -> None:
    reference = start(model, [(0, 0.5), (2, 0.2)], decode=[(1, 0.1)])
    reference.forward(model.ids(10))
    assert sorted(reference.depths) == [1] * 5 + [3] * 3 + [4] * 2
    assert reference.last_pass.tolist() == [[10, 10, 0], [5, 5, 0], [5, 5, 0], [2, 2, 0]]
    assert reference.computed == pytest.approx((5 + 9 + 8) / 40)
    assert reference.reached_top == pytest.approx(0.2)
    runs = [(run["first_layer"], run["last_layer"]) for run in reference.last_trace]
    assert runs == [(0, 0), (1, 2), (3, 3)]
    before = np.array(reference.depths)

    reference.forward(model.ids(1), generated=True)
    assert reference.last_pass[:2].tolist() == [[11, 1, 0], [11, 6, 5]]
    (stayed,) = set(kept(reference)) - {10}
    assert reference.depths[stayed] == 4
    assert all(reference.depths[i] == max(2, before[i]) for i in range(10) if i != stayed)
    assert reference.last_pass[2].tolist() == [2, 1 + (before[stayed] < 3), int(before[stayed] in (1, 2))]


def test_frozen_decode_attends_to_what_the_caches_hold(model: Tiny) -> None:
    reference = start(model, [(0, 0.5), (2, 0.2)], decode="frozen")
    reference.forward(model.ids(10))
    before = list(reference.depths)
    reference.forward(model.ids(1), generated=True)
    assert reference.depths == [*before, 4]
    assert reference.last_pass.tolist() == [[11, 1, 0], [6, 1, 0], [6, 1, 0], [3, 1, 0]]
    assert all(run["scores"] is None for run in reference.last_trace)
    reference.forward(model.ids(3, seed=1))
    assert reference.last_pass[:, 0].tolist() == [14, 8, 8, 4]


def test_min_tokens_counts_the_prompt_tokens_with_the_new_ones(model: Tiny) -> None:
    for generated in (False, True):
        reference = start(model, [(0, 0.5)], min_tokens=8, prune_generated=generated)
        reference.forward(model.ids(7))
        reference.forward(model.ids(1), generated=True)
        assert len(kept(reference)) == (4 if generated else 8)
        reference.forward(model.ids(2))
        assert len(kept(reference)) == (5 if generated else 1 + math.ceil(0.5 * 9))


def test_revived_tokens_get_the_values_of_a_dense_run(model: Tiny) -> None:
    """A prefix is kept, so all prompt tokens but the last attend to the same tokens as in a dense run."""
    ids = model.ids(20)
    dense = start(model)
    dense.forward(ids)
    reference = start(model, [(0, 0.01)], sink=6, decode=[])
    reference.forward(ids)
    assert kept(reference) == [0, 1, 2, 3, 4, 5, 19]
    reference.forward([5], generated=True)
    assert reference.last_pass[1].tolist() == [21, 14, 13]
    for layer in range(4):
        for i in range(19):
            np.testing.assert_allclose(reference.K[layer][i], dense.K[layer][i], rtol=0, atol=1e-12)
            np.testing.assert_allclose(reference.V[layer][i], dense.V[layer][i], rtol=0, atol=1e-12)
