"""Sampling: what changes the logits, log probabilities, and several answers of one prefill."""

from typing import Any

import numpy as np
import pytest

import lazyllm
from lazyllm import LLM, SamplingParams

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
PROMPT, NEW = "The sea was calm. The bells rang.", 6


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_a_repetition_penalty_is_on_all_tokens_of_the_context(llm: LLM, penalty: float) -> None:
    answer = llm.generate(PROMPT, max_new_tokens=NEW, sampling=SamplingParams(repetition_penalty=penalty))
    session, ids = llm.session(), llm.tokenizer.encode(PROMPT)
    logits, context = session.forward(ids), list(ids)
    for token in answer.token_ids:
        by_hand = [
            (value / penalty if value > 0 else value * penalty) if i in context else value
            for i, value in enumerate(logits.tolist())
        ]
        assert token == int(np.argmax(by_hand))
        context.append(token)
        logits = session.forward([token], generated=True)


def test_min_p_leaves_what_is_likely_enough(llm: LLM) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for temperature, share, kept in ((1.0, 0.5, 2), (1.0, 0.11, 3), (2.0, 0.5, 3), (1.0, 0.0, 4)):
        applied = SamplingParams(temperature=temperature, min_p=share).applied(logits, [])
        assert np.isfinite(applied).tolist() == [i < kept for i in range(4)]
    assert SamplingParams(min_p=0.9).changes_logits is False  # greedy takes the likeliest
    sampling = SamplingParams(temperature=5.0, min_p=1.0, seed=3)
    likeliest = llm.generate(PROMPT, max_new_tokens=NEW, sampling=sampling).token_ids
    assert likeliest == llm.generate(PROMPT, max_new_tokens=NEW).token_ids


@pytest.mark.parametrize("pruning", [None, 2.0])
def test_logprobs_are_the_models_own(llm: LLM, pruning: Any) -> None:
    sampling = SamplingParams(temperature=1.0, repetition_penalty=1.2, seed=5)
    answer = llm.generate(PROMPT, pruning, max_new_tokens=NEW, sampling=sampling, logprobs=3)
    assert answer.logprobs is not None
    session = llm.session(pruning)
    logits = session.forward(llm.tokenizer.encode(PROMPT)).astype(np.float64)
    for token, found in zip(answer.token_ids, answer.logprobs, strict=True):
        own = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-own)[:3].tolist()
        assert list(found)[:3] == best
        assert set(found) == {*best, token}
        assert found == {i: pytest.approx(own[i], abs=1e-5) for i in found}
        logits = session.forward([token], generated=True).astype(np.float64)
    assert llm.generate(PROMPT, max_new_tokens=1).logprobs is None
    plain = llm.generate(PROMPT, pruning, max_new_tokens=NEW, sampling=sampling)
    assert plain.token_ids == answer.token_ids


@pytest.mark.parametrize("pruning", [None, 1.5, lazyllm.Pruning({1: 0.5}), "random:keep=0.5"], ids=str)
def test_n_answers_are_those_of_n_calls(llm: LLM, pruning: Any) -> None:
    sampling = SamplingParams(temperature=2.0, seed=7)
    answers = llm.generate(PROMPT * 4, pruning, n=3, max_new_tokens=NEW, sampling=sampling)
    for i, answer in enumerate(answers):
        alone = llm.generate(PROMPT * 4, pruning, max_new_tokens=NEW, sampling=sampling.for_prompt(i))
        assert answer.token_ids == alone.token_ids
        assert (answer.seed, answer.speedup, len(answer.passes)) == (7 + i, alone.speedup, len(alone.passes))
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    both = llm.generate([PROMPT, PROMPT * 4], pruning, n=2, max_new_tokens=1, sampling=sampling)
    assert [len(some) for some in both] == [2, 2]


def test_n_answers_in_a_prefix_and_in_a_chat(llm: LLM) -> None:
    sampling = SamplingParams(temperature=2.0, seed=7)
    session = llm.session(1.5)
    session.read(PROMPT * 3)
    messages = [{"role": "user", "content": PROMPT}]
    for prompt, options in ((PROMPT, {"prefix": session}), (messages, {"prefix": lazyllm.PrefixCache()})):
        first, second = llm.generate(prompt, n=2, max_new_tokens=3, sampling=sampling, **options)
        alone = llm.generate(prompt, max_new_tokens=3, sampling=sampling, **options)
        assert first.token_ids == alone.token_ids
        assert second.token_ids != first.token_ids


def test_stop_token_ids_end_an_answer_even_at_once(llm: LLM) -> None:
    whole = llm.generate(PROMPT, max_new_tokens=NEW).token_ids
    for stop in whole:
        answer = llm.generate(PROMPT, max_new_tokens=NEW, stop_token_ids=[stop])
        assert (answer.finish_reason, answer.token_ids) == ("stop", whole[: whole.index(stop) + 1])


def test_what_the_checkpoint_recommends(llm: LLM, monkeypatch: Any) -> None:
    for given, expected in (
        ({}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams()),
        (QWEN | {"min_p": None, "num_beams": 1}, SamplingParams(temperature=0.6, top_k=20, top_p=0.95)),
        ({"do_sample": True, "top_p": 0.9}, SamplingParams(temperature=1.0, top_p=0.9)),
        ({"repetition_penalty": 1.1}, SamplingParams(repetition_penalty=1.1)),
    ):
        monkeypatch.setattr(llm.checkpoint, "generation_config", given)
        assert SamplingParams.of(llm) == expected
