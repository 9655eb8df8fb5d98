"""Consequences of the method's definition: tests of the numbered facts."""

from dataclasses import replace
from typing import Any

import pytest
from comparison import converse
from tiny import DEVICE, Build, Shape, pruning
from tolerances import LOGITS, error

from lazyllm import _core

ARITHMETICS = [("F32", "f32", "f32"), ("BF16", "f32", "f32"), ("F16", "f32", "f16")] + [
    ("BF16", compute, "bf16") for compute in ("bf16", "int8") if _core.features()[compute]
]
ATTENDING_ROWS = 8192  # LAZY_PART_ROWS of csrc/cache.h
THREADS = [1, 2] if DEVICE == "cpu" else [1]  # of the CPU; they do not apply to other devices
Pass = tuple[int, bool]

STEP = [(1, True)]
CONVERSATION: list[Pass] = [(40, False), *4 * STEP, (9, False), *3 * STEP, (1, False), (6, False), *3 * STEP]

SCHEDULES: dict[str, dict[str, Any]] = {
    "same": pruning([(0, 0.7), (2, 0.4), (3, 0.2)]),
    "own": pruning([(0, 0.4), (1, 0.2)], decode=[(0, 0.6), (3, 0.5)]),
    "revive all": pruning([(0, 0.5), (1, 0.3), (2, 0.2), (3, 0.1)], decode=[]),
    "frozen": pruning([(1, 0.5), (3, 0.2)], decode="frozen"),
    "generated too": pruning([(0, 0.5), (2, 0.3)], prune_generated=True),
    "static": pruning([(2, 0.3, True)], decode=[], average=True),
    "for good": pruning([(1, 0.6, True), (3, 0.3)]),
    "for good, late": pruning([(0, 0.7), (2, 0.4, True)], decode=[(1, 0.5), (2, 0.3, True)]),
    "mass": pruning([(1, (0.7, 0.1, 0.6)), (3, (0.5, 0.0, 1.0))]),
    "protecting": pruning([(0, 0.3), (2, 0.2)], sink=3, window=4, protect=[(10, 14)], queries=4, smooth=3, words=True),
}


@pytest.mark.parametrize("rules", SCHEDULES.values(), ids=SCHEDULES)
def test_facts_1_and_2_sets_shrink_layers_fill_from_below_and_nothing_is_computed_twice(
    tiny_of: Build, rules: dict[str, Any]
) -> None:
    """Layers 0 ... depth-1 hold a token's K and V, so one Aux row, the input of layer `depth` - 1, revives it."""
    n_layers = 5
    tiny = tiny_of(Shape(seed=20, n_layers=n_layers))
    layers_of: dict[int, list[int]] = {}
    depths: list[int] = []
    for number, seen in enumerate(converse(tiny.load().session(rules), tiny, CONVERSATION)):
        new = CONVERSATION[number][0]
        depths += [0] * new
        first = len(depths) - new
        in_play_before, computed_before = set(range(len(depths))), set(range(first, len(depths)))
        for layer, (in_play, computed) in enumerate(seen["sets"]):
            assert set(computed) <= set(in_play) <= in_play_before
            assert (in_play, computed) == (sorted(in_play), sorted(computed))
            revived = set(computed) - computed_before
            assert all(depths[i] == layer for i in revived)
            assert seen["last_pass"][layer] == [len(in_play), len(computed), len(revived)]
            for i in computed:
                layers_of.setdefault(i, []).append(layer)
            # every token in play has K and V at this layer: computed now or before
            assert all(layer in layers_of[i] for i in in_play)
            in_play_before, computed_before = set(in_play), set(computed)
            assert in_play[-1] == len(depths) - 1
        assert all(now >= before for now, before in zip(seen["depths"], depths, strict=True))
        depths = seen["depths"]
        assert depths[-1] == n_layers
        for i, depth in enumerate(depths):
            assert layers_of[i] == list(range(depth))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("threads", THREADS)
def test_fact_3_no_schedule_is_bit_equal_to_an_empty_one_and_to_keep_1(
    tiny_of: Build, dtype: str, threads: int
) -> None:
    tiny = tiny_of(Shape(seed=22, n_layers=5, dtype=dtype))
    passes = [(67, False), *CONVERSATION]
    dense = converse(tiny.load(threads).session(None), tiny, passes)
    everything = [(layer, 1.0) for layer in range(4)]
    for rules in (
        pruning(),
        pruning(everything),
        pruning([(2, 1.0)], decode="frozen"),
        pruning([], decode=everything),
        pruning(everything, prune_generated=True, queries=3, smooth=3),
        pruning([(1, (0.1, 1.0, 1.0))]),
        pruning([(0, 0.1)], min_tokens=10_000),
    ):
        for got, want in zip(converse(tiny.load(threads).session(rules), tiny, passes), dense, strict=True):
            for name in ("logits", "sets", "depths"):
                assert got[name] == want[name]
            assert set(want["depths"]) == {5}


def test_fact_4_reviving_all_before_the_last_layer_gives_dense_logits(tiny_of: Build) -> None:
    """Drops before the last layer leave its inputs dense, so a pass with all tokens in play is dense.

    This detects a revived key or value in a wrong slot without a reference.
    """
    tiny = tiny_of(Shape(seed=23, n_layers=4))
    dense = tiny.load().session(None)
    pruned = tiny.load().session(pruning([(2, 0.2)], decode=[]))
    turned = tiny.load().session(pruning([], decode=[(2, 0.2)]))
    revived = 0
    for number, (count, generated) in enumerate(CONVERSATION):
        ids = tiny.ids(count, number)
        want, *got = (session.forward(ids, generated=generated) for session in (dense, pruned, turned))
        assert [error(logits, want) <= LOGITS["F32"] for logits in got] == [generated, not generated]
        revived += pruned.last_pass[3][2]
    assert revived > 30


OPTIONS: dict[str, Any] = {"sink": 2, "window": 2, "queries": 5, "smooth": 5, "decode": [(1, 0.4)]}
STABLE = {"keep": pruning([(0, 0.6), (1, 0.3)]), "all options": pruning([(0, (0.8, 0.05, 0.7)), (1, 0.2)], **OPTIONS)}


@pytest.mark.skipif(DEVICE != "cpu", reason="threads are the CPU's")
@pytest.mark.parametrize("prompt", [1, 2, 63, 64, 65, 3000])
@pytest.mark.parametrize("rules", STABLE.values(), ids=STABLE)
def test_fact_5_selections_are_the_same_at_any_number_of_threads(
    tiny_of: Build, rules: dict[str, Any], prompt: int
) -> None:
    tiny = tiny_of(Shape(seed=26, n_layers=3, context=4096))
    passes: list[Pass] = [(prompt, False), (1, True), (1, True), (64, False), (1, True)]
    models = [tiny.load(threads) for threads in (1, 2, 3)]
    assert [model.threads for model in models] == [1, 2, 3]
    first, *others = (converse(model.session(rules), tiny, passes) for model in models)
    assert others == [first, first]


def test_sessions_that_drop_for_good_alone_have_no_aux_cache(tiny_of: Build) -> None:
    model = tiny_of(Shape(seed=27)).load()
    schedules = ([(1, 0.5, True)], [(1, 0.5, True), (2, 0.3)], [(1, 0.5)])
    good, both, other = (model.session(pruning(stages)).bytes_for(100) for stages in schedules)
    assert good < both == other


@pytest.mark.skipif(DEVICE != "cpu", reason="other devices divide work by the number of rows")
@pytest.mark.parametrize("windows", [(0,), (0, 100), (300, 0, 37)], ids=str)
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(("dtype", "compute", "kv"), ARITHMETICS)
def test_parts_of_a_dense_prompt_give_the_bits_of_one_pass(
    tiny_of: Build, dtype: str, compute: str, kv: str, experts: bool, windows: tuple[int, ...]
) -> None:
    """1025 rows and a few more leave a remainder that must not be summed in the order of few rows. An expert
    has fewer rows in a part than in the whole."""
    shape = Shape(seed=27, n_layers=3, hidden=64, head_dim=16, context=2100, dtype=dtype, windows=windows)
    if experts:
        shape = replace(shape, n_experts=6, experts_per_token=2, expert_ffn=32, expert_layers=(1, 0))
    tiny = tiny_of(replace(shape, post_norms=windows != (0,)))
    model = tiny.load(compute=compute, kv=kv)
    for parts in ([512, 513], [550, 550], [984, 200], [193, 700, 192, 1011]):
        ids = tiny.ids(sum(parts))
        want, session = model.session(None).forward(ids), model.session(None)
        for part in parts:
            got, ids = session.forward(ids[:part]), ids[part:]
        assert got.tobytes() == want.tobytes()
    ids = tiny.ids(700)
    want, session = model.session(None).forward(ids), model.session(None)
    for part in (1, 150, 3, 515, 10, 20):
        session.read(ids[:part])
        ids = ids[part:]
    assert session.forward(ids).tobytes() == want.tobytes()


@pytest.mark.skipif(DEVICE != "cpu", reason="takes minutes where a device is emulated")
@pytest.mark.parametrize("rules", [None, pruning([(1, 0.97)], queries=4)], ids=["dense", "pruned"])
def test_a_pass_of_more_rows_than_attend_at_a_time_gives_the_bits_of_its_parts(
    tiny_of: Build, rules: dict[str, Any] | None
) -> None:
    tiny = tiny_of(Shape(seed=28, n_layers=3, hidden=64, head_dim=16, context=9000, dtype="BF16", windows=(0, 300)))
    model, ids = tiny.load(), tiny.ids(ATTENDING_ROWS + 500)
    whole, parts = model.session(rules), model.session(rules)
    parts.read(ids[:5000])
    assert whole.forward(ids).tobytes() == parts.forward(ids[5000:]).tobytes()
    assert whole.forward(ids[:1], generated=True).tobytes() == parts.forward(ids[:1], generated=True).tobytes()


@pytest.mark.skipif(DEVICE != "cpu", reason="takes minutes where a device is emulated")
def test_more_tokens_than_attend_at_a_time_are_revived_at_once(tiny_of: Build) -> None:
    """A session whose rule asks more rows has room for the queries of all."""
    tiny = tiny_of(Shape(seed=28, n_layers=3, hidden=64, head_dim=16, context=9000))
    model, ids = tiny.load(), tiny.ids(ATTENDING_ROWS + 500)
    sessions = [
        model.session(pruning([(0, 0.01)], decode=[(1, 0.99)], queries=queries, window=100))
        for queries in (4, ATTENDING_ROWS + 1)
    ]
    for session in sessions:
        session.forward(ids)
    parts, whole = (session.forward(ids[:1], generated=True) for session in sessions)
    assert parts.tobytes() == whole.tobytes()
    assert sessions[0].last_pass[1, 1] > ATTENDING_ROWS
