"""A text read once and many questions: each answer is that of one prompt of both."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folders import SHAPE

import lazyllm
from lazyllm import LLM
from lazyllm.document import costs
from lazyllm.pruning import DENSE

MODEL = replace(SHAPE, n_layers=8, context=8000)
TEXT = "The sea was calm. The bells rang over the town. " * 30
QUESTIONS = ["What was calm?", "Who rang the bells? " * 12, "\nWhere?", "Why?"]
NEW = 4


def whole(llm: LLM, question: str, **options: Any) -> list[int]:
    return llm.generate(f"{TEXT}\n\n{question}", max_new_tokens=NEW, **options).token_ids


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("pruning", [None, 1.5, lazyllm.Pruning({1: 0.5, 3: 0.3})], ids=str)
def test_answers_are_those_of_one_prompt(llm: LLM, pruning: Any, chat: bool) -> None:
    doc = llm.document(TEXT, pruning, chat=chat)
    want = [whole(llm, question, pruning=pruning, chat=chat) for question in QUESTIONS]
    assert [answer.token_ids for answer in doc.ask(QUESTIONS, max_new_tokens=NEW)] == want
    single = doc.ask(QUESTIONS[0], max_new_tokens=NEW)
    assert single.token_ids == want[0]
    assert single.passes["computed"][0] < len(single.prompt_ids)
    stream = doc.stream(QUESTIONS[1], max_new_tokens=NEW)
    assert "".join(stream) == stream.finished().text
    assert stream.finished().token_ids == want[1]


def test_a_chat_goes_on(llm: LLM) -> None:
    doc = llm.document(TEXT, 1.5, chat=True)
    chat, session = doc.chat(), llm.session(1.5)
    for number, question in enumerate(QUESTIONS[:3]):
        prompt = question if number else f"{TEXT}\n\n{question}"
        want = session.ask(prompt, chat=True, max_new_tokens=NEW)
        assert chat.ask(question, max_new_tokens=NEW).token_ids == want.token_ids
    alone = whole(llm, QUESTIONS[0], pruning=1.5, chat=True)
    assert doc.ask(QUESTIONS[0], max_new_tokens=NEW).token_ids == alone


@pytest.mark.parametrize("chat", [False, True])
def test_it_is_saved_with_what_was_computed(llm: LLM, tmp_path: Path, chat: bool) -> None:
    doc = llm.document(TEXT, 1.5, chat=chat)
    doc.save(tmp_path / "document")
    restored = llm.restore_document(tmp_path / "document")
    assert repr(restored) == repr(doc)
    answer = restored.ask(QUESTIONS[0], max_new_tokens=NEW)
    assert answer.token_ids == whole(llm, QUESTIONS[0], pruning=1.5, chat=chat)
    assert answer.passes["computed"][0] < len(answer.prompt_ids)
    session = llm.session()
    session.forward([1, 2])
    session.save(tmp_path / "session")
    with pytest.raises(ValueError, match="is a session without a document; restore opens it"):
        llm.restore_document(tmp_path / "session")


def test_repr_says_what_it_costs_and_many_questions_read_densely(llm: LLM) -> None:
    doc = llm.document(TEXT * 3, 1.5)
    n = len(llm.tokenizer.encode(TEXT * 3))
    read, each, dense_each, enough = costs(llm, doc.pruning, n)
    assert enough
    assert read + enough * each > 1 + enough * dense_each
    assert read + (enough - 1) * each <= 1 + (enough - 1) * dense_each
    words = rf"reading took the work of {read:.2f} dense prefills, each question takes {each:.2f}.* from {enough} q"
    assert re.search(words, repr(doc))
    assert llm.document(TEXT * 3, 1.5, questions=enough).pruning == DENSE
    assert str(llm.document(TEXT * 3, 1.5, questions=enough - 1).pruning) == "1.5x"
    assert "without" not in repr(llm.document(TEXT))


def test_refusals(llm: LLM) -> None:
    for text in ("", None, [1, 2]):
        with pytest.raises(TypeError, match="a document must be text"):
            llm.document(text)  # type: ignore[arg-type]
    doc = llm.document(TEXT)
    with pytest.raises(TypeError, match="a question must be text that is not empty, not ''"):
        doc.ask("")
    with pytest.raises(ValueError, match="make it with chat=True"):
        doc.chat()
    with pytest.raises(ValueError, match="questions must be from 1"):
        llm.document(TEXT, questions=0)
    with pytest.raises(ValueError, match="prompts cannot be read in parts"):
        llm.document(TEXT, "random:keep=0.5")
