"""Pruning and Mass: accepted and refused arguments, printed forms, JSON, and counted work."""

import dataclasses
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from strategies import prunings

import lazyllm
from lazyllm import Drop, Mass, Pruning, Scoring, parse_method
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.method import LABEL_WIDTH


def config_of(n_layers: int, **shape: Any) -> ModelConfig:
    """A model's config with these fields; those that counted work does not read are None."""
    others = dict.fromkeys(field.name for field in dataclasses.fields(ModelConfig))
    layers = {"n_layers": n_layers, "windows": (0,) * n_layers, "expert_layers": (0,) * n_layers}
    return ModelConfig(**{**others, **layers, **shape})


SMOL = config_of(30, hidden=576, n_heads=9, n_kv_heads=3, head_dim=64, ffn=1536, vocab=49152)
SMALL = config_of(5, hidden=12, n_heads=4, n_kv_heads=2, head_dim=6, ffn=20, vocab=33, windows=(0, 7, 0, 12, 7))


# ---- refused arguments and their messages ----------------------------------------------------------


def test_stages_refused() -> None:
    for stages, kind, words in (
        ([(5, 0.5), (5, 0.4)], ValueError, "layer 5 has two stages"),
        ({5: 0.5, "5": 0.4}, ValueError, "layer 5 has two stages"),
        ({3: 0.5, 5: 0.6}, ValueError, "layer 5 keeps 0.6 after 0.5"),
        ({3: Drop(0.5), 5: 0.6}, ValueError, "layer 5 keeps 0.6 after 0.5"),
        ({3: {"drop": 1.5}}, ValueError, "Drop keep must be above 0 and at most 1"),
        ({3: {"drop": 0.5, "mass": 0.9}}, ValueError, "have drop, or mass, keep_min, keep_max"),
        ({3: 0.0}, ValueError, "above 0 and at most 1, not 0.0"),
        ({3: math.nan}, ValueError, "must be finite"),
        ({3: "0.5"}, TypeError, "must be a number, not '0.5'"),
        ({3: True}, TypeError, "must be a number, not True"),
        ({-1: 0.5}, ValueError, "layer must be from 0"),
        ({"-1": 0.5}, ValueError, "layer must be a whole number, not '-1'"),
        ({2.0: 0.5}, TypeError, "layer must be a whole number, not 2.0"),
        ({3: {"keep_min": 0.5}}, ValueError, "mass, keep_min, keep_max"),
        ([3, 0.5], TypeError, "pairs, not [3, 0.5]"),
        ([(3, 0.5, 1)], TypeError, "pairs, not [(3, 0.5, 1)]"),
        ("10:0.5", TypeError, "pairs, not '10:0.5'"),
        (0.5, TypeError, "pairs, not 0.5"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            Pruning(stages)


def test_options_refused() -> None:
    for options, kind, words in (
        ({"decode": "dense"}, ValueError, 'decode must be "same", "frozen" or stages'),
        ({"sink": -1}, ValueError, "sink must be from 0"),
        ({"scoring": {"queries": 0}}, ValueError, "queries must be from 1"),
        ({"scoring": {"pooling": "median"}}, ValueError, "pooling must be mean or rms, not 'median'"),
        ({"scoring": {"head": 4}}, TypeError, "head must be (layer, head) or None, not 4"),
        ({"scoring": {"head": (4, -1)}}, ValueError, "head's number must be from 0"),
        ({"scoring": {"head": (4, 1), "queries": 513}}, ValueError, "queries must be at most 512 with a head, not 513"),
        ({"scoring": {"memory": 1.1}}, ValueError, "memory must be from 0 to 1, not 1.1"),
        ({"scoring": {"memory": 0.9, "revival": 2}}, ValueError, "revival must be from 0 to 1, not 2"),
        ({"scoring": {"revival": 0.5}}, ValueError, "revival needs memory"),
        ({"scoring": {"memory": 0.9, "gain": 0.5}}, ValueError, "gain must be from 1 to 1000, not 0.5"),
        ({"scoring": {"gain": 2}}, ValueError, "gain needs memory"),
        ({"scoring": {"smooth": 0}}, ValueError, "smooth must be from 1"),
        ({"scoring": {"smooth": 4}}, ValueError, "smooth must be odd"),
        ({"scoring": {"row": 4}}, ValueError, "scoring has no field 'row'; its fields are layers, queries"),
        ({"scoring": "recommended"}, TypeError, "scoring must be a lazyllm.Scoring or a mapping"),
        ({"decode": {3: 1.5}}, ValueError, "keep of the stage at layer 3 must be above 0"),
        ({"prune_generated": 1}, TypeError, "prune_generated must be True or False"),
        ({"protect": (3, 5)}, TypeError, "spans (first, end), not (3, 5)"),
        ({"protect": [(3, 3)]}, ValueError, "must end after its first position, not (3, 3)"),
        ({"protect": [(-1, 3)]}, ValueError, "first position must be from 0"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            Pruning({3: 0.5}, **options)


def test_rules_and_json_refused() -> None:
    for make, kind, words in (
        (lambda: Mass(0.0), ValueError, "mass must be above 0"),
        (lambda: Mass(0.9, 0.6, 0.5), ValueError, "keep_min must be from 0 to keep_max=0.5, not 0.6"),
        (lambda: Mass(0.9, 0.0, 0.0), ValueError, "Mass keep_max must be above 0"),
        (lambda: Drop(0.0), ValueError, "Drop keep must be above 0 and at most 1, not 0"),
        (lambda: Drop(Mass(0.9)), TypeError, "Drop takes a keep, not Mass(0.9), by which each decode step"),
        (lambda: parse_method("{ten: 0.7}"), ValueError, "pruning is not JSON"),
        (lambda: parse_method("none.json"), FileNotFoundError, "there is no preset none.json"),
        (lambda: parse_method('{"10": 0.7, "10": 0.5}'), ValueError, "'10' appears twice"),
        (lambda: parse_method('{"10": NaN}'), ValueError, "must be finite, not nan"),
        (lambda: parse_method('{"stages": {}, "sinks": 4}'), ValueError, "no field 'sinks'; its fields are stages"),
        (lambda: Pruning.from_fields(0.5), TypeError, "must be a JSON object"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            make()


def test_layers_are_checked_against_the_model() -> None:
    Pruning({28: 0.5, 29: Drop(0.5)}).check(SMOL)
    for pruning, layer in (
        (Pruning({29: 0.5}), 29),
        (Pruning({3: 0.5}, decode={29: 0.5}), 29),
        (Pruning({30: Drop(0.5)}), 30),
    ):
        for call in pruning.check, lambda config, pruning=pruning: pruning.flops(config, 100):
            with pytest.raises(ValueError, match=f"layer {layer} is out of reach: it must be below {layer}"):
                call(SMOL)


# ---- accepted arguments ----------------------------------------------------------------------------


def test_forms_of_the_same_schedule_are_equal() -> None:
    forms: list[Any] = [{10: 0.7, 20: 0.5}, {20: 0.5, "10": 0.7}, [(20, 0.5), [10, 0.7]]]
    forms.append({np.int64(10): np.float64(0.7), 20: 0.5})
    assert {Pruning(form) for form in forms} == {Pruning(forms[0])}
    assert Pruning(None) == Pruning({}) == Pruning([]) == Pruning()
    assert parse_method("{}") == parse_method("null") == parse_method("None") == Pruning()
    assert parse_method("{10: 0.7, 20:0.5}") == Pruning({10: 0.7, 20: 0.5})
    assert Pruning({3: {"mass": 0.9, "keep_max": 0.5}}) == Pruning({3: Mass(0.9, keep_max=0.5)})
    assert Pruning({3: {"drop": 0.4}, 5: 0.3}) == Pruning({3: Drop(0.4), 5: 0.3}) != Pruning({3: 0.4, 5: 0.3})
    # the keeps of Mass stages may rise
    assert Pruning({1: 0.5, 2: Mass(0.9), 3: 0.5}).stages == ((1, 0.5), (2, Mass(0.9)), (3, 0.5))


def test_labels_are_short_and_tell_settings_apart() -> None:
    recommended = Scoring.recommended()
    labels = {
        "dense": Pruning(),
        "{7: 0.44, 15: 0.38}": Pruning({7: 0.44, 15: 0.38}),
        "{7: 0.44} smooth=13": Pruning({7: 0.44}, scoring=Scoring(smooth=13)),
        "{7: 0.44} recommended": Pruning({7: 0.44}, scoring=recommended, sink=4),
        "{7: 0.44} recommended sink=0": Pruning({7: 0.44}, scoring=recommended),
        "{7: 0.44} recommended smooth=13": Pruning({7: 0.44}, scoring=Scoring.recommended(9, 1.0), sink=4),
        "{7: 0.44} decode={3: 0.5} sink=4": Pruning({7: 0.44}, decode={3: 0.5}, sink=4),
    }
    assert [pruning.label for pruning in labels.values()] == list(labels)
    long = [Pruning(dict.fromkeys(range(20), keep)) for keep in (0.5, 0.6)]
    long += [Pruning({**dict.fromkeys(range(19), 0.5), 19: 0.25})]
    assert len({pruning.label for pruning in long}) == 3
    assert all(len(pruning.label) == LABEL_WIDTH for pruning in long)


def test_core_has_plain_values_only() -> None:
    pruning = Pruning({10: Drop(0.7), 20: Mass(0.9, 0.1, 0.5)}, decode={3: 0.5}, protect=[(1, 2)])
    stages = [(10, 0.7, True), (20, (0.9, 0.1, 0.5))]
    assert pruning.core() == tiny.pruning(stages, decode=[(3, 0.5)], protect=((1, 2),))
    assert Pruning(decode="frozen").core()["decode"] == "frozen"


# ---- JSON ------------------------------------------------------------------------------------------


def as_pruning(rules: dict[str, Any]) -> Pruning:
    """The Pruning of options in the form of the core."""

    def stages(given: Any) -> dict[int, Any]:
        return {
            layer: Mass(*rule) if isinstance(rule, tuple) else Drop(rule) if for_good else rule
            for layer, rule, *for_good in given
        }

    scoring = Scoring(**{field.name: rules[field.name] for field in dataclasses.fields(Scoring)})
    decode = rules["decode"] if isinstance(rules["decode"], str) else stages(rules["decode"])
    options = {name: rules[name] for name in ("sink", "window", "protect", "min_tokens", "prune_generated")}
    return Pruning(stages(rules["stages"]), decode=decode, scoring=scoring, **options)


@given(prunings(30).map(as_pruning))
def test_json_and_what_it_prints_give_the_same_pruning_back(pruning: Pruning) -> None:
    again = parse_method(pruning.to_json())
    assert again == pruning
    assert hash(again) == hash(pruning)
    assert eval(repr(pruning), vars(lazyllm)) == pruning


# ---- counted work ----------------------------------------------------------------------------------


def flops_token_by_token(pruning: Pruning, c: Any, n: int, all_score: bool = False) -> int:
    """The same count, token by token. Those that go on count as the last ones in play."""
    in_play = list(range(n))
    forced = {n - 1} | set(range(min(pruning.sink, n))) | set(range(max(0, n - pruning.window), n))
    for a, b in pruning.protect:
        forced |= set(range(a, min(b, n)))
    width, total = c.n_heads * c.head_dim, 2 * c.hidden * c.vocab
    for layer in range(c.n_layers):
        before = in_play
        rule = dict(pruning.stages).get(layer) if n >= pruning.min_tokens else None
        if rule is not None:
            keep = {Mass: "keep_max", Drop: "keep"}.get(type(rule))
            count = math.ceil((getattr(rule, keep) if keep else rule) * n)
            others = [i for i in in_play if i not in forced]
            in_play = sorted(forced | set(others[: max(0, count - len(forced))]))
        total += len(before) * 2 * 2 * c.hidden * c.n_kv_heads * c.head_dim
        going_on = 1 if layer == c.n_layers - 1 else len(in_play)
        for i in range(len(before) - going_on, len(before)):
            total += 2 * 2 * c.hidden * width + 2 * 3 * c.hidden * c.ffn
            total += 4 * width * min(i + 1, c.windows[layer] or n)
        if n >= pruning.min_tokens and any(
            stage - pruning.scoring.layers < layer <= stage
            and (all_score or (c.windows[layer] or math.inf) >= (c.windows[stage] or math.inf))
            for stage, _ in pruning.stages
        ):
            seen = min(len(before), c.windows[layer] or n)
            total += 2 * width * seen * min(pruning.scoring.queries, len(before))
    return total


@given(prunings(5).map(as_pruning), st.integers(1, 40))
def test_flops_are_those_of_counting_token_by_token(pruning: Pruning, n: int) -> None:
    assert pruning.flops(SMALL, n) == flops_token_by_token(pruning, SMALL, n)


def test_a_head_that_the_model_lacks_is_refused() -> None:
    for head in ((5, 0), (0, 4)):
        with pytest.raises(ValueError, match=f"no head {head[1]} in layer {head[0]}: the model has 5 layers of 4"):
            Pruning({1: 0.5}, scoring=Scoring(head=head)).check(SMALL)


def test_for_speedup_places_stages_after_layers_that_see_the_whole_context() -> None:
    """Gemma 3 270M: the last layer of six sees everything."""
    model = dataclasses.replace(SMOL, n_layers=18, windows=(512, 512, 512, 512, 512, 0) * 3)
    pruning = Pruning.for_speedup(1.5, model, 4000)
    assert [layer for layer, _ in pruning.stages] == [5, 11]
    assert 1.5 <= pruning.speedup(model, 4000) <= 1.515
    early = Pruning.for_speedup(3.2, model, 1000)  # four stages, all of them after layers 5 and 11
    assert [layer for layer, _ in early.stages] == [5, 11]
    assert early.stages[1][1] == pytest.approx(0.32 * early.stages[0][1], rel=1e-2)
    assert 3.2 <= early.speedup(model, 1000) <= 3.24
    local = dataclasses.replace(model, windows=(512,) * 18)
    assert [layer for layer, _ in Pruning.for_speedup(1.5, local, 4000).stages] == [4, 9, 11]


def test_speedup_of_a_known_schedule() -> None:
    assert Pruning().speedup(SMOL, 1000) == 1.0
    assert Pruning({9: 0.7, 15: 0.5, 22: 0.3}).speedup(SMOL, 2405) == pytest.approx(1.6319, abs=1e-4)
    with pytest.raises(ValueError, match="n_prompt must be from 1"):
        Pruning().flops(SMOL, 0)


@given(st.floats(1.01, 5.0), st.integers(1000, 30000), st.sampled_from(["recommended", "paper"]))
def test_for_speedup_is_within_one_percent_above(target: float, n: int, scoring: Any) -> None:
    pruning = Pruning.for_speedup(target, SMOL, n, scoring)
    assert target <= pruning.speedup(SMOL, n) <= 1.01 * target
    at_other_length = Pruning.for_speedup(target, SMOL, 2 * n, scoring)
    assert [layer for layer, _ in pruning.stages] == [layer for layer, _ in at_other_length.stages]


def test_for_speedup_scores_as_it_is_told() -> None:
    pruning = Pruning.for_speedup(2.0, SMOL, 3000)
    ((_, keep), *_) = pruning.stages
    assert pruning.scoring == Scoring.recommended(3000, keep)
    assert pruning.sink == 4
    paper = Pruning.for_speedup(2.0, SMOL, 3000, scoring="paper")
    assert (paper.scoring, paper.sink) == (Scoring.paper(), 0)
    own = Scoring(layers=3, queries=16)
    assert Pruning.for_speedup(2.0, SMOL, 3000, scoring=own).scoring == own
    with pytest.raises(ValueError, match="scoring must be recommended or paper, not 'best'"):
        Pruning.for_speedup(2.0, SMOL, 3000, scoring="best")  # type: ignore[arg-type]


@pytest.mark.parametrize(("target", "layers"), [(1.2, [7, 15, 19]), (2.5, [7, 15, 19]), (5.0, [4, 7, 15, 19])])
def test_for_speedup_prunes_no_earlier_than_it_must(target: float, layers: list[int]) -> None:
    pruning = Pruning.for_speedup(target, SMOL, 3000)
    assert [layer for layer, _ in pruning.stages] == layers
    assert all(later <= earlier for (_, earlier), (_, later) in itertools.pairwise(pruning.stages))


def test_for_speedup_of_tiny_models_and_prompts() -> None:
    for n_layers in range(2, 9):
        layers = {"n_layers": n_layers, "windows": (0,) * n_layers, "expert_layers": (0,) * n_layers}
        model = dataclasses.replace(SMALL, **layers)
        pruning = Pruning.for_speedup(1.05, model, 7, scoring="paper")
        pruning.check(model)
        assert pruning.speedup(model, 7) >= 1.05


@pytest.mark.parametrize(
    ("target", "model", "kind", "words"),
    [
        (20.0, SMOL, ValueError, r"a speedup of 20 is out of reach: .* at most \d\.\d\d at 2000 prompt"),
        (0.5, SMOL, ValueError, "the speedup must be above 1, which is dense"),
        (2.0, dataclasses.replace(SMALL, n_layers=1), ValueError, "the model has one layer"),
        (3.0, dataclasses.replace(SMALL, n_layers=1), ValueError, "the model has one layer"),
        (2.0, 5, TypeError, r"config must be that of a model, such as llm\.config, not 5"),
    ],
)
def test_for_speedup_refuses_what_cannot_be(target: float, model: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        Pruning.for_speedup(target, model, 2000)


def test_recommended_smooths_less_where_few_tokens_are_kept() -> None:
    widths = {100: 13, 154: 15, 205: 19, 320: 29, 342: 31, 1024: 31}
    assert {n_kept: Scoring.recommended(2 * n_kept, 0.5).smooth for n_kept in widths} == widths
    recommended = Scoring(
        layers=5, queries=32, pooling="rms", smooth=31, words=True, memory=0.95, gain=4.0, revival=0.3
    )
    assert Scoring.recommended() == recommended
    assert Scoring.recommended(4096, 0.3) == recommended
    assert Scoring.paper() == Scoring()
    with pytest.raises(ValueError, match=r"n_prompt must be from 1 to .*, not 0"):
        Scoring.recommended(0)
