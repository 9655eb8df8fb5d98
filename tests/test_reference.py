"""Tests the reference with hand-worked cases and independent computations of the same numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import Reference
from tiny import Shape, Tiny, build, pruning

RULES = Shape(n_layers=4, hidden=16, n_heads=2, n_kv_heads=1, head_dim=8, ffn=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Tiny:
    return build(RULES, folder)


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


# ---- the count of a keep stage ----


@pytest.mark.parametrize(
    ("keep", "n", "count"),
    [
        (0.1, 30, 3),
        (0.1, 31, 4),
        (0.55, 100, 56),
        (0.07, 100, 8),
        (0.29, 100, 29),
        (0.7, 10, 7),
        (1.0, 9, 9),
        (1e-9, 9, 1),
    ],
)
def test_count_is_the_ceiling_of_the_double_product(keep: float, n: int, count: int) -> None:
    scores = np.random.default_rng(0).random(n)
    assert len(choose(selecting("p" * n), keep, scores.tolist())) == count == math.ceil(keep * n)


def test_count_refers_to_all_prompt_tokens_not_to_those_in_play() -> None:
    reference = selecting("p" * 10)
    assert reference.select(0.3, [1, 2, 5, 6, 9], np.array([5.0, 4.0, 3.0, 2.0, 1.0])) == [1, 2, 9]
    assert reference.select(0.7, [1, 2, 5, 6, 9], np.array([5.0, 4.0, 3.0, 2.0, 1.0])) == [1, 2, 5, 6, 9]


def test_generated_tokens_stay_and_are_not_counted() -> None:
    assert choose(selecting("ppppggg"), 0.5, [3.0, 1.0, 4.0, 2.0, 0.0, 0.0, 0.0]) == [0, 2, 4, 5, 6]
    assert choose(selecting("ppgpp"), 0.5, [3.0, 4.0, 0.0, 5.0, 0.0]) == [2, 3, 4]


def test_generated_tokens_are_counted_and_dropped_when_asked_for() -> None:
    reference = selecting("ppppggg", prune_generated=True)
    assert choose(reference, 0.5, [3.0, 1.0, 4.0, 2.0, 0.5, 2.5, 0.0]) == [0, 2, 5, 6]


def test_ties_go_to_the_smaller_position() -> None:
    assert choose(selecting("pppppp"), 0.5, [1.0] * 6) == [0, 1, 5]
    assert choose(selecting("pppppp"), 0.5, [1.0, 2.0, 1.0, 2.0, 2.0, 0.0]) == [1, 3, 5]


def test_margin_is_the_relative_gap_at_the_cut() -> None:
    reference = selecting("pppppp")
    choose(reference, 0.5, [9.0, 8.0, 6.0, 1.0, 1.0, 1.0])
    assert reference.margin == pytest.approx(0.25)
    choose(reference, 1.0, [1.0] * 6)
    assert reference.margin == pytest.approx(0.25)


def test_nan_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        choose(selecting("ppp"), 0.5, [1.0, math.nan, 0.0])


# ---- tokens that are always kept ----


def test_forced_tokens_may_exceed_the_budget() -> None:
    reference = selecting("pppppppppp", sink=2, window=3, protect=[(4, 6)])
    assert choose(reference, 0.1, [0.0] * 10) == [0, 1, 4, 5, 7, 8, 9]


def test_forced_tokens_count_towards_the_budget() -> None:
    reference = selecting("pppppppppp", sink=1)
    assert choose(reference, 0.3, [0.0, 1.0, 2.0, 9.0, 3.0, 1.0, 1.0, 1.0, 1.0, 0.0]) == [0, 3, 9]


def test_sink_and_window_skip_generated_tokens() -> None:
    reference = selecting("gpgppgpgg", sink=1, window=2, prune_generated=True)
    assert choose(reference, 0.01, [0.0] * 9) == [1, 4, 6, 8]


def test_sink_and_window_longer_than_the_prompt() -> None:
    assert choose(selecting("ppp", window=5), 0.1, [0.0] * 3) == [0, 1, 2]
    assert choose(selecting("ppp", sink=5), 0.1, [0.0] * 3) == [0, 1, 2]


def test_protected_spans_may_lie_beyond_the_context() -> None:
    assert choose(selecting("pppp", protect=[(1, 2), (9, 12)]), 0.1, [0.0] * 4) == [1, 3]


# ---- mass ----


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        ((0.5, 0.0, 1.0), [1, 2, 7]),  # 0 (query) + 40 + 20 of 100
        ((0.4, 0.0, 1.0), [1, 7]),  # reached exactly
        ((0.6, 0.0, 1.0), [1, 2, 7]),
        ((0.61, 0.0, 1.0), [1, 2, 3, 7]),
        ((0.5, 0.55, 1.0), [0, 1, 2, 3, 7]),  # at least ceil(0.55 * 8) = 5; equal scores in order of position
        ((0.9, 0.0, 0.25), [1, 7]),  # at most 2
        ((1e-6, 0.0, 1.0), [1, 7]),
    ],
)
def test_mass_takes_until_the_share_is_reached(rule: tuple[float, float, float], want: list[int]) -> None:
    assert choose(selecting("p" * 8), rule, [10.0, 40.0, 20.0, 15.0, 5.0, 5.0, 5.0, 0.0]) == want


def test_mass_is_never_below_the_forced_tokens() -> None:
    reference = selecting("p" * 8, sink=1, window=4)
    assert choose(reference, (0.1, 0.0, 0.25), [0.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == [0, 4, 5, 6, 7]


def test_mass_counts_forced_tokens_first() -> None:
    reference = selecting("p" * 5, sink=1)
    assert choose(reference, (0.6, 0.0, 1.0), [30.0, 10.0, 40.0, 20.0, 0.0]) == [0, 2, 4]
    assert choose(reference, (0.3, 0.0, 1.0), [30.0, 10.0, 40.0, 20.0, 0.0]) == [0, 4]


def test_mass_looks_at_prompt_tokens_only() -> None:
    assert choose(selecting("pppgg"), (0.5, 0.0, 1.0), [2.0, 1.0, 1.0, 90.0, 5.0]) == [0, 3, 4]


def test_margin_of_mass_is_the_distance_to_the_threshold() -> None:
    reference = selecting("p" * 5)
    choose(reference, (0.45, 0.0, 1.0), [40.0, 30.0, 20.0, 10.0, 0.0])
    assert reference.margin == pytest.approx(0.05)


# ---- scores ----


def test_smooth_averages_over_neighbours_in_play_and_over_fewer_at_the_ends() -> None:
    reference = selecting("p" * 5, smooth=3)
    row = np.array([[1.0, 2.0, 6.0, 4.0, 5.0], [3.0, 4.0, 8.0, 6.0, 7.0]])  # two heads; mean 2 3 7 5 6
    raw = reference.attention({4: row}, [4], [0, 3, 5, 8, 9], 4)
    assert reference.smooth(raw) == pytest.approx([2.5, 4.0, 5.0, 6.0, 5.5])


def test_queries_averages_the_last_new_rows_that_are_computed() -> None:
    rows = {i: np.full((1, 4), float(i)) for i in (2, 7, 8, 9)}  # token 2 is revived, the others are new
    reference = selecting("p" * 10, queries=2)
    assert reference.attention(rows, [2, 7, 8, 9], [2, 7, 8, 9], 7) == pytest.approx([8.5] * 4)
    reference = selecting("p" * 10, queries=9)
    assert reference.attention(rows, [2, 7, 8, 9], [2, 7, 8, 9], 7) == pytest.approx([8.0] * 4)


def test_pooling_max_takes_the_largest_of_the_rows() -> None:
    rows = {8: np.array([[0.1, 0.9], [0.3, 0.7]]), 9: np.array([[0.4, 0.6], [0.4, 0.6]])}
    reference = selecting("p" * 10, queries=2, pooling="max")
    assert reference.attention(rows, [8, 9], [0, 1], 8) == pytest.approx([0.4, 0.8])


def test_shares_leave_out_tokens_that_never_leave_play() -> None:
    """Position 0 is a sink, 2 is generated, 4 is the query token: 1 and 3 share the layer's score."""
    reference = selecting("ppgpp", sink=1)
    shares = reference.shares(np.array([0.4, 0.1, 0.1, 0.3, 0.1]), [0, 1, 2, 3, 4])
    assert shares == pytest.approx({0: 0.0, 1: 0.25, 2: 0.0, 3: 0.75, 4: 0.0})
    assert reference.shares(np.array([0.9, 0.1]), [0, 4]) == {0: 0.0, 4: 0.0}


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


def test_score_is_the_query_tokens_own_attention_row(model: Tiny) -> None:
    ids = model.ids(12)
    reference = start(model, [(2, 0.5)])
    reference.forward(ids)
    scores = next(run["scores"] for run in reference.last_trace if run["scores"] is not None)
    assert scores.sum() == pytest.approx(1.0)
    _, rows = full_matrix(model, ids)
    assert scores == pytest.approx(rows[2][:, -1].mean(axis=0), rel=1e-9)


# ---- whole passes ----


def test_depths_by_hand(model: Tiny) -> None:
    reference = start(model, [(0, 0.5), (2, 0.2)], decode=[(1, 0.1)])
    reference.forward(model.ids(10))
    assert sorted(reference.depths) == [1] * 5 + [3] * 3 + [4] * 2
    assert reference.last_pass.tolist() == [[10, 10, 0], [5, 5, 0], [5, 5, 0], [2, 2, 0]]
    assert reference.computed == pytest.approx((5 + 9 + 8) / 40)
    assert reference.reached_top == pytest.approx(0.2)
    assert [(run["first_layer"], run["last_layer"]) for run in reference.last_trace] == [
        (0, 0),
        (1, 2),
        (3, 3),
    ]
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


def test_min_tokens_counts_the_new_tokens(model: Tiny) -> None:
    reference = start(model, [(0, 0.5)], min_tokens=8)
    reference.forward(model.ids(7))
    assert reference.reached_top == 1.0
    reference.forward(model.ids(1), generated=True)
    assert reference.reached_top == 1.0
    assert len(kept(reference)) == 1 + math.ceil(0.5 * 7)


def test_last_prompt_token_of_one(model: Tiny) -> None:
    reference = start(model, [(0, 0.1), (1, 0.1)])
    reference.forward(model.ids(1))
    assert reference.depths == [4]


# ---- independent computations ----


def full_matrix(model: Tiny, ids: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """A dense forward pass on whole matrices: all logits, and every layer's attention maps (heads, n, n)."""
    c, w = model.config, {name: array.astype(np.float64) for name, array in model.weights.items()}
    n, heads, size = len(ids), c["n_heads"], c["head_dim"]

    def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x * (np.square(x).mean(-1, keepdims=True) + c["norm_eps"]) ** -0.5 * weight

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    angles = np.outer(np.arange(n, dtype=np.float32), c["inv_freq"]).astype(np.float64)
    turn = c["rope_scale"] * np.exp(1j * angles)

    def heads_of(x: np.ndarray, layer: int, name: str) -> np.ndarray:
        x = x.reshape(n, -1, size)
        if c["qk_norm"]:
            x = rms(x, w[f"model.layers.{layer}.self_attn.{name}_norm.weight"])
        turned = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turn[:, None, :]
        x = np.concatenate([turned.real, turned.imag], -1).transpose(1, 0, 2)
        return x if name == "q" else np.repeat(x, heads // c["n_kv_heads"], axis=0)

    x, maps = w["model.embed_tokens.weight"][ids], []
    for layer in range(c["n_layers"]):
        at = f"model.layers.{layer}."
        y = rms(x, w[at + "input_layernorm.weight"])
        q = heads_of(project(y, at + "self_attn.q_proj"), layer, "q")
        k = heads_of(project(y, at + "self_attn.k_proj"), layer, "k")
        v = project(y, at + "self_attn.v_proj").reshape(n, -1, size).transpose(1, 0, 2)
        attention = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(size)) * np.tri(n)
        attention /= attention.sum(-1, keepdims=True)
        maps.append(attention)
        x = x + project(
            (attention @ np.repeat(v, heads // c["n_kv_heads"], axis=0)).transpose(1, 0, 2).reshape(n, -1),
            at + "self_attn.o_proj",
        )
        y = rms(x, w[at + "post_attention_layernorm.weight"])
        gate = project(y, at + "mlp.gate_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * project(y, at + "mlp.up_proj"), at + "mlp.down_proj")
    head = w["model.embed_tokens.weight" if c["tied"] else "lm_head.weight"]
    return rms(x, w["model.norm.weight"]) @ head.T, maps


SHAPES = [
    Shape(seed=1),
    Shape(seed=2, n_kv_heads=1, head_dim=16, tied=True, rope_scale=1.2),
    Shape(seed=3, n_kv_heads=4, hidden=24, qkv_bias=True, o_bias=True, dtype="BF16"),
    Shape(seed=4, n_layers=6, hidden=48, qk_norm=True, dtype="F16"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_equals_a_full_matrix_forward(shape: Shape, folder: Path) -> None:
    tiny = build(shape, folder)
    ids = tiny.ids(23)
    want, _ = full_matrix(tiny, ids)
    reference = start(tiny)
    for first, end, generated in (
        (0, 15, False),
        (15, 16, True),
        (16, 17, True),
        (17, 22, False),
        (22, 23, True),
    ):
        got = reference.forward(ids[first:end], generated)
        np.testing.assert_allclose(got, want[end - 1], rtol=0, atol=1e-11)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "shape", [Shape(seed=1), Shape(seed=3, n_kv_heads=4, hidden=24, qkv_bias=True, o_bias=True)], ids=str
)
def test_dense_equals_transformers(shape: Shape, folder: Path) -> None:
    import torch
    import transformers

    tiny = build(shape, folder)
    config = transformers.LlamaConfig(
        **shape.dimensions,
        rms_norm_eps=tiny.config["norm_eps"],
        attention_bias=shape.qkv_bias,
        attn_implementation="eager",
    )
    torch.set_num_threads(1)
    llama = transformers.LlamaForCausalLM(config).eval()
    llama.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in tiny.weights.items()})
    ids = tiny.ids(40)
    with torch.no_grad():
        want = llama(torch.tensor([ids])).logits[0, -1].numpy()
    np.testing.assert_allclose(start(tiny).forward(ids), want, rtol=0, atol=2e-5 * np.abs(want).max())


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


def test_stage_before_the_last_layer_is_undone_by_reviving_all(model: Tiny) -> None:
    """Drops before the last layer leave its inputs dense, so a pass with all tokens in play is dense."""
    ids = model.ids(33)
    want, _ = full_matrix(model, ids)
    reference = start(model, [(2, 0.3)], decode=[])
    for first, end, generated in (
        (0, 20, False),
        (20, 21, True),
        (21, 30, False),
        (30, 32, False),
        (32, 33, True),
    ):
        got = reference.forward(ids[first:end], generated)
        assert np.allclose(got, want[end - 1], rtol=0, atol=1e-11) == generated
