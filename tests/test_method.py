"""Compares the engine with the reference on random models, schedules, options, prompts and decode steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import drive, per_layer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import EXPERTS, WINDOWS, conversations, prunings, shapes
from tiny import Build, Shape, Tiny, build, pruning, random_weights
from tolerances import NEAR_TIE

EXAMPLES = settings().max_examples  # set by the profile that conftest.py loads


@settings(max_examples=3 * EXAMPLES)
@given(data=st.data(), shape=shapes(), seed=st.integers(0, 2**16))
def test_engine_equals_reference(tiny_of: Build, data: st.DataObject, shape: Shape, seed: int) -> None:
    rules = data.draw(prunings(shape.n_layers))
    reference = drive(tiny_of(shape), rules, data.draw(conversations()), seed)
    assume(reference.margin > NEAR_TIE)


@settings(max_examples=EXAMPLES)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_heavy_pruning_with_many_revivals(tiny_of: Build, data: st.DataObject, seed: int) -> None:
    """Few tokens are kept and every step selects anew, so revivals occur at all depths and in all orders; in
    half of the examples stages drop for good below and above others, in prompts and decode steps."""
    shape = Shape(seed=5, n_layers=6, windows=data.draw(WINDOWS), **data.draw(EXPERTS))
    for_good = st.lists(st.booleans(), min_size=5, max_size=5) if data.draw(st.booleans()) else st.just([False] * 5)

    def drawn(least: float, most: float) -> list[tuple[Any, ...]]:
        keeps = sorted(data.draw(st.lists(st.floats(least, most), min_size=5, max_size=5)), reverse=True)
        stages = zip(range(5), keeps, data.draw(for_good), strict=True)
        return [stage if stage[2] else stage[:2] for stage in stages]

    options = {"prune_generated": data.draw(st.booleans()), "memory": data.draw(st.sampled_from([0.0, 0.8]))}
    decode = data.draw(st.sampled_from(["same", "frozen", drawn(0.1, 0.9)]))
    rules = pruning(drawn(0.05, data.draw(st.sampled_from([0.5, 0.9]))), decode=decode, **options)
    turns = data.draw(
        st.lists(st.sampled_from([(1, True), (1, True), (5, False), (9, False)]), min_size=4, max_size=10)
    )
    reference = drive(tiny_of(shape), rules, [(data.draw(st.integers(20, 40)), False), *turns], seed)
    assume(reference.margin > NEAR_TIE)


@settings(max_examples=EXAMPLES // 3)
@given(data=st.data(), threads=st.integers(2, 3), seed=st.integers(0, 2**16))
def test_long_prompts_on_several_threads(tiny_of: Build, data: st.DataObject, threads: int, seed: int) -> None:
    """Prompts just below, at and above the block sizes of kernels and thread pools."""
    windows = data.draw(st.sampled_from([(0,), (40, 0, 100)]))
    shape = Shape(seed=6, n_layers=3, n_heads=2, n_kv_heads=1, qk_norm=True, windows=windows)
    prompt = data.draw(st.sampled_from([63, 64, 65, 127, 130, 200]))
    rules = data.draw(prunings(shape.n_layers))
    passes = [(prompt, False), (1, True), (1, True), (70, False), (1, True)]
    reference = drive(tiny_of(shape), rules, passes, seed, threads)
    assume(reference.margin > NEAR_TIE)


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A model whose queries are zero: all attention is uniform, so all scores are bitwise equal."""
    shape = Shape(seed=7)
    zero = np.zeros((shape.n_heads * shape.head_dim, shape.hidden))
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(shape.n_layers)]
    return build(shape, tmp_path_factory.mktemp("blind"), dict.fromkeys(names, zero))


def kept_by(tiny: Tiny, count: int, rules: dict[str, Any]) -> list[list[int]]:
    session = tiny.load().session(rules)
    session.trace = True
    session.forward(tiny.ids(count))
    return [in_play for in_play, _ in per_layer(session.last_trace, tiny.shape.n_layers)]


@pytest.mark.parametrize("queries", [1, 4])
def test_ties_go_to_the_smaller_position(blind: Tiny, queries: int) -> None:
    in_play = kept_by(blind, 40, pruning([(0, 0.5), (1, 0.25)], queries=queries))
    assert in_play == [list(range(40)), [*range(19), 39], [*range(9), 39], [*range(9), 39]]


def test_mass_is_reached_when_the_sum_equals_it(blind: Tiny) -> None:
    """32 scores of 1/32: the query token, which is always kept, and 15 others sum to exactly one half."""
    in_play = kept_by(blind, 32, pruning([(0, (0.5, 0.0, 1.0))]))
    assert in_play == [list(range(32)), *[[*range(15), 31]] * 3]


@pytest.mark.parametrize(
    "options",
    [
        *({"sink": 4}, {"window": 4}, {"protect": [(3, 6), (5, 9), (45, 90)]}, {"queries": 6}),
        *({"queries": 6, "pooling": "rms", "layers": 2}, {"queries": 3, "pooling": "rms"}, {"smooth": 5}),
        *({"head": (1, 1)}, {"head": (0, 3), "layers": 3, "pooling": "rms", "queries": 4}),
        *({"layers": 3, "sink": 2, "queries": 6}, {"layers": 2, "smooth": 3}, {"layers": 9}),
        *({"words": True}, {"words": True, "smooth": 5, "layers": 3, "queries": 6, "memory": 0.9, "gain": 2.0}),
        *({"memory": 0.9, "gain": 2.5, "revival": 0.4, "layers": 2}, {"layers": 2}, {"memory": 0.8}),
        {"memory": 1.0, "layers": 3, "decode": [(1, 0.5), (2, 0.4)]},
        *({"queries": 6, "smooth": 5, "sink": 2, "window": 3}, {"min_tokens": 36}, {"prune_generated": True}),
        *({"prune_generated": True, "sink": 3, "window": 8, "protect": [(31, 33)]}, {"decode": "frozen"}),
        *({"decode": []}, {"decode": [(2, 0.9)]}, {"decode": [(0, 0.2), (1, (0.5, 0.05, 0.3))]}),
        *({"stages": [(0, 0.6, True), (2, 0.3)]}, {"stages": [(0, 0.6), (2, 0.3, True)]}),
        {"stages": [(0, 0.6, True), (2, 0.3)], "decode": "frozen"},
        {"stages": [(0, 0.6, True), (2, 0.3)], "decode": [(1, 0.4, True)]},
        {"stages": [(0, 0.6, True), (2, 0.3, True)], "prune_generated": True, "window": 3},
    ],
    ids=str,
)
def test_each_option_alone(tiny_of: Build, options: dict[str, Any]) -> None:
    """Runs one fixed conversation per option, so that a failure names the option."""
    passes = [(30, False), *[(1, True)] * 3, (7, False), (9, True), (1, True), (1, False), (1, True)]
    rules = pruning(**{"stages": [(0, 0.6), (2, 0.3)], **options})
    assert drive(tiny_of(Shape(seed=9)), rules, passes).margin > NEAR_TIE


@pytest.mark.parametrize(
    "mass", [(0.9, 0.0, 1.0), (0.5, 0.0, 1.0), (0.9, 0.0, 0.2), (0.2, 0.5, 1.0), (0.6, 0.0, 0.05)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"sink": 3, "window": 4}, {"prune_generated": True}, {"smooth": 3}], ids=str)
def test_mass_stages(tiny_of: Build, mass: tuple[float, float, float], options: dict[str, Any]) -> None:
    rules = pruning([(0, mass), (1, 0.5), (2, mass)], **options)
    passes = [(40, False), (1, True), (1, True), (6, False), (1, True)]
    assert drive(tiny_of(Shape(seed=10)), rules, passes).margin > NEAR_TIE


STATIC = pruning([(2, 0.5, True)], decode=[], average=True)


@pytest.mark.parametrize(("layer", "rules"), [(1, pruning([(1, 0.5)])), (0, STATIC)], ids=["own", "lower"])
def test_scores_that_are_not_numbers_are_an_error(tmp_path: Path, layer: int, rules: dict[str, Any]) -> None:
    """Attention logits that overflow give NaN scores, by which no selection is possible."""
    shape = Shape(seed=11)
    plain = random_weights(shape)
    names = [f"model.layers.{layer}.self_attn.{name}_proj.weight" for name in "qk"]
    tiny = build(shape, tmp_path, {name: plain[name] * 1e25 for name in names})
    session = tiny.load().session(rules)
    with pytest.raises((ValueError, ArithmeticError, RuntimeError), match=f"layer {layer}"):
        session.forward(tiny.ids(20))
