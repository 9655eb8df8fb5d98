"""Nonsense of every kind ends in ValueError or TypeError with words, never in a crash or a wrong answer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from lazyllm import LLM, Mass, Pruning, SamplingParams, _core, parse_method

IDS = list(range(40, 60))
plain = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3))
numbers = plain | st.integers(-2, 40) | st.floats(-0.5, 1.5)
junk = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)
OPTIONS = ("decode", "sink", "window", "protect", "scoring")
options = st.fixed_dictionaries({}, optional=dict.fromkeys((*OPTIONS, "min_tokens"), junk))


def unless_refused(make: Callable[[], Any]) -> Any:
    """The object that is made; None if it is refused in words."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        if not str(error):
            raise
        return None


@given(stages=st.one_of(junk, st.dictionaries(numbers, numbers, max_size=3)), options=options)
def test_a_pruning_is_refused_or_can_be_run(llm: LLM, stages: Any, options: dict[str, Any]) -> None:
    def checked() -> Pruning:
        pruning = Pruning(stages, **options)
        pruning.check(llm.config)
        return pruning

    if pruning := unless_refused(checked):
        assert parse_method(pruning.to_json()) == pruning
        assert llm.session(pruning).forward(IDS).shape == (llm.config.vocab,)


@given(st.lists(numbers, min_size=1, max_size=4))
def test_a_mass_and_sampling_are_refused_or_hold_their_rules(llm: LLM, values: list[Any]) -> None:
    if mass := unless_refused(lambda: Mass(*values[:3])):
        assert 0 <= mass.keep_min <= mass.keep_max <= 1
        assert 0 < mass.mass <= 1
    if sampling := unless_refused(lambda: SamplingParams(*values)):
        assert len(llm.generate(IDS, max_new_tokens=2, sampling=sampling).token_ids) <= 2


@given(junk)
def test_a_prompt_is_refused_or_answered(llm: LLM, prompt: Any) -> None:
    made = unless_refused(lambda: llm.generate(prompt, max_new_tokens=1, progress=False))
    assert made is None or isinstance(made, list) or len(made.token_ids) == 1


@given(junk, st.booleans())
def test_ids_are_refused_or_run(llm: LLM, ids: Any, generated: bool) -> None:
    session = llm.session(Pruning({1: 0.5}))
    session.forward(IDS)
    ran = unless_refused(lambda: session.forward(ids, generated=generated)) is not None
    assert ran == (session.length > len(IDS))
    session.forward([1])


@given(st.text(max_size=30))
def test_any_text_is_a_prompt(llm: LLM, text: str) -> None:
    unless_refused(lambda: parse_method(text))
    try:
        made = llm.generate(text, max_new_tokens=2)
    except ValueError:
        assert text == "" or not text.isprintable()
        return
    assert llm.tokenizer.decode(made.prompt_ids) == text


class Reading:
    """A number only by `__float__` or `__index__`, either of which empties a container."""

    def __init__(self, value: Any, container: Any) -> None:
        self.value, self.container = value, container

    def __float__(self) -> float:
        self.container.clear()
        return float(self.value)

    def __index__(self) -> int:
        self.container.clear()
        return int(self.value)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    return tiny.build(tiny.Shape(), tmp_path_factory.mktemp("model"))


def test_a_number_may_empty_the_list_that_it_is_read_from(made: tiny.Tiny) -> None:
    """The core reads a copy: under ASan, a use after free otherwise."""
    model = made.load()
    want = model.session(tiny.pruning([(0, 0.75), (1, 0.5), (2, 0.25)])).forward(made.ids(40))
    changes: list[tuple[str, int, Callable[[list[Any], dict[str, Any]], Any]]] = [
        ("stages", 0, lambda items, _: (0, Reading(0.75, items))),
        ("stages", 0, lambda items, _: (Reading(0, items), 0.75)),
        ("stages", 0, lambda _, pruning: (0, Reading(0.75, pruning))),
        ("stages", 2, lambda items, _: (2, (Reading(1.0, items), 0.25, 0.25))),
        ("decode", 0, lambda items, _: (0, Reading(0.5, items))),
        ("protect", 0, lambda items, _: (Reading(0, items), 1)),
    ]
    for name, place, change in changes:
        pruning = tiny.pruning([(0, 0.75), (1, 0.5), (2, 0.25)])
        items = {"decode": [(0, 0.5), (1, 0.5)], "protect": [(0, 1), (0, 1)]}.get(name, pruning["stages"])
        items[place] = change(items, pruning)
        pruning[name] = items
        got = model.session(pruning).forward(made.ids(40))
        if name != "protect":
            np.testing.assert_array_equal(got, want)


def test_a_number_may_empty_the_tables_of_a_checkpoint(made: tiny.Tiny) -> None:
    config, tensors = dict(made.config), list(made.tensors)
    name, dtype, shape, *place = tensors[0]
    config["norm_eps"] = Reading(config["norm_eps"], config)
    tensors[0] = (name, dtype, (Reading(shape[0], tensors), *shape[1:]), *place)
    model = _core.Model(config, [str(made.path)], tensors)
    got, want = (each.session(None).forward(made.ids(9)) for each in (model, made.load()))
    np.testing.assert_array_equal(got, want)
