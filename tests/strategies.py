"""Strategies of the property tests: model shapes, settings of pruning, conversations."""

from typing import Any

from hypothesis import strategies as st
from tiny import DTYPES, Shape, pruning

# without norms before attention q and k are as large as the hidden states, unless they are normed
NORMS_BEHIND = {"post_norms": True, "pre_norms": False, "qk_norm": True}
QK_NORM = {"qk_norm": True}
QK_NORMS = st.sampled_from([{}, QK_NORM, QK_NORM | {"wide_qk_norm": True}, QK_NORM | {"late_qk_norm": True}])
GROWTH = {"query_growth": 0.7, "query_step": 9}
ROPES = st.sampled_from([{}, {"no_rope": (False, True)}, {"short_context": 30}, GROWTH])
WINDOWS = st.sampled_from([(0,), (0,), (7,), (0, 3), (5, 5, 0), (1, 20)])


SOME_EXPERTS: dict[str, st.SearchStrategy[Any]] = {
    "expert_layers": st.sampled_from([(1,), (0, 1), (1, 1, 0)]),
    "n_experts": st.just(7),
    "experts_per_token": st.sampled_from([1, 2, 5, 7]),
    "expert_ffn": st.just(24),
    "normed_experts": st.booleans(),
}
EXPERTS = st.one_of(st.just({}), st.fixed_dictionaries(SOME_EXPERTS))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    windows = draw(WINDOWS)
    gemma = draw(st.booleans())
    layer_norm = not gemma and draw(st.booleans())
    norms = draw(st.sampled_from([{}, {"post_norms": True}, NORMS_BEHIND])) if gemma else {}
    norms = draw(st.sampled_from([{}, QK_NORM]) if layer_norm else QK_NORMS) | norms
    return Shape(
        seed=draw(st.integers(0, 3)),
        windows=windows,
        local_theta=draw(st.sampled_from([None, 100.0])) if any(windows) else None,
        query_scalar=draw(st.sampled_from([None, 11.0])) if gemma else None,
        attention_cap=draw(st.sampled_from([0.0, 2.5])) if gemma else 0.0,
        logit_cap=draw(st.sampled_from([0.0, 20.0])) if gemma else 0.0,
        embedding_scale=draw(st.sampled_from([1.0, 5.5])) if gemma else 1.0,
        norm_plus_one=gemma and draw(st.booleans()),
        layer_norm=layer_norm,
        parallel=not gemma and draw(st.booleans()),
        gelu=gemma and draw(st.booleans()),
        **draw(EXPERTS),
        n_layers=draw(st.integers(3, 6)),
        hidden=draw(st.sampled_from([24, 32, 48])),
        n_kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([8, 16])),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        **norms,
        rope_scale=draw(st.sampled_from([1.0, 1.2])),
        rotary_dim=draw(st.sampled_from([None, None, 6])),
        paired_rope=draw(st.booleans()),
        **draw(ROPES if "late_qk_norm" not in norms else st.just({})),
        logit_scale=draw(st.sampled_from([1.0, 0.3])),
        dtype=draw(st.sampled_from(DTYPES)),
    )


KEEPS = st.one_of(st.sampled_from([0.1, 0.3, 0.55, 0.7, 0.9, 1.0]), st.floats(0.01, 1.0))
BOUNDS = st.sampled_from([(0.0, 1.0), (0.0, 0.4), (0.3, 1.0), (0.2, 0.6), (0.5, 0.5)])


@st.composite
def stages(draw: st.DrawFn, n_layers: int) -> list[tuple[Any, ...]]:
    """Keeps, of which some drop for good, as all after the last layer do, and masses."""
    layers = sorted(draw(st.sets(st.integers(0, n_layers - 1), max_size=4)))
    keeps = sorted(draw(st.lists(KEEPS, min_size=len(layers), max_size=len(layers))), reverse=True)
    drawn: list[tuple[Any, ...]] = list(zip(layers, keeps, strict=True))
    for k, layer in enumerate(layers):
        kind = draw(st.integers(0, 5)) if layer < n_layers - 1 else 1
        if kind == 0:
            drawn[k] = layer, (draw(st.floats(0.05, 0.98)), *draw(BOUNDS))
        elif kind < 3:
            drawn[k] = layer, keeps[k], True
    return drawn


@st.composite
def prunings(draw: st.DrawFn, n_layers: int) -> dict[str, Any]:
    """Random pruning options; each has its default value about half of the time."""

    def option(default: Any, values: st.SearchStrategy[Any]) -> Any:
        return draw(st.one_of(st.just(default), values))

    memory = option(0.0, st.sampled_from([0.3, 0.8, 0.95, 1.0]))
    spans = st.tuples(st.integers(0, 40), st.integers(1, 5)).map(lambda span: (span[0], span[0] + span[1]))
    return pruning(
        draw(stages(n_layers)),
        decode=draw(st.one_of(st.sampled_from(["same", "frozen"]), stages(n_layers))),
        sink=option(0, st.integers(1, 5)),
        window=option(0, st.integers(1, 5)),
        protect=option([], st.lists(spans, max_size=3)),
        queries=option(1, st.integers(2, 8)),
        pooling=option("mean", st.just("rms")),
        head=option(None, st.tuples(st.integers(0, n_layers - 1), st.just(0))),
        layers=option(1, st.integers(2, 7)),
        smooth=option(1, st.sampled_from([3, 5, 7])),
        words=option(False, st.just(True)),
        memory=memory,
        revival=option(1.0, st.sampled_from([0.0, 0.5])) if memory else 1.0,
        gain=option(1.0, st.sampled_from([2.0, 7.5])) if memory else 1.0,
        min_tokens=option(0, st.integers(1, 40)),
        prune_generated=option(False, st.just(True)),
    )


FOLLOW_UP = st.integers(1, 12).map(lambda count: [(count, False)])
DECODE = st.integers(1, 6).map(lambda steps: [(1, True)] * steps)
REPLAY = st.integers(2, 4).map(lambda count: [(count, True)])  # several generated tokens in one pass


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[int, bool]]:
    turns = draw(st.lists(st.one_of(DECODE, FOLLOW_UP, DECODE, REPLAY), max_size=5))
    return [(draw(st.integers(1, 40)), False), *(step for turn in turns for step in turn)]
