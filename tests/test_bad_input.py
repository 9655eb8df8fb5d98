"""Nonsense of every kind ends in ValueError or TypeError with words, never in a crash or a wrong answer."""

from __future__ import annotations

from typing import Any

import pytest
from folders import model_folder
from hypothesis import given
from hypothesis import strategies as st

import lazyllm
from lazyllm import LLM, Mass, Pruning, SamplingParams

IDS = list(range(40, 60))
numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.integers(-2, 40),
    st.floats(-0.5, 1.5),
)
junk = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=6,
)
options = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("decode", "sink", "window", "protect", "queries", "smooth", "min_tokens", "prune_generated"), junk
    ),
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return lazyllm.load(model_folder(tmp_path_factory.mktemp("model")), threads=1)


def refused_in_words(error: Exception) -> None:
    assert isinstance(error, ValueError | TypeError)
    assert str(error)


@given(stages=st.one_of(junk, st.dictionaries(numbers, numbers, max_size=3)), options=options)
def test_a_pruning_is_refused_or_can_be_run(llm: LLM, stages: Any, options: dict[str, Any]) -> None:
    try:
        pruning = Pruning(stages, **options)
        pruning.check(llm.config)
    except (ValueError, TypeError) as error:
        refused_in_words(error)
        return
    assert Pruning.from_json(pruning.to_json()) == pruning
    assert llm.session(pruning).forward(IDS).shape == (llm.config.vocab,)


@given(st.lists(numbers, min_size=1, max_size=3))
def test_a_mass_is_refused_or_holds_its_rules(values: list[Any]) -> None:
    try:
        mass = Mass(*values)
    except (ValueError, TypeError) as error:
        refused_in_words(error)
        return
    assert 0 <= mass.keep_min <= mass.keep_max <= 1
    assert 0 < mass.mass <= 1


@given(st.lists(numbers, max_size=4))
def test_sampling_is_refused_or_draws(llm: LLM, values: list[Any]) -> None:
    try:
        sampling = SamplingParams(*values)
    except (ValueError, TypeError) as error:
        refused_in_words(error)
        return
    assert len(llm.generate(IDS, max_new_tokens=2, sampling=sampling).token_ids) <= 2


@given(junk)
def test_a_prompt_is_refused_or_answered(llm: LLM, prompt: Any) -> None:
    try:
        made = llm.generate(prompt, max_new_tokens=1, progress=False)
    except (ValueError, TypeError) as error:
        refused_in_words(error)
        return
    assert isinstance(made, list) or len(made.token_ids) == 1


@given(junk, st.booleans())
def test_ids_are_refused_or_run(llm: LLM, ids: Any, generated: bool) -> None:
    session = llm.session(Pruning({1: 0.5}))
    session.forward(IDS)
    before = session.length
    try:
        session.forward(ids, generated=generated)
    except (ValueError, TypeError) as error:
        refused_in_words(error)
        assert session.length == before
    session.forward([1])


@given(st.text(max_size=40))
def test_json_is_refused_or_read(text: str) -> None:
    try:
        Pruning.from_json(text)
    except (ValueError, TypeError) as error:
        refused_in_words(error)


@given(st.text(max_size=30))
def test_any_text_is_a_prompt(llm: LLM, text: str) -> None:
    try:
        made = llm.generate(text, max_new_tokens=2)
    except ValueError as error:
        refused_in_words(error)
        assert text == "" or not text.isprintable()
        return
    assert llm.tokenizer.decode(made.prompt_ids) == text
