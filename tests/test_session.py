"""Sessions: growing contexts, chats, memory, interruption, and use from several threads."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from folders import SHAPE

import lazyllm
from lazyllm import LLM, Pruning

STAGES = Pruning({1: 0.6, 3: 0.3})
IDS = list(range(40, 90))


def test_forward_gives_logits(llm: LLM) -> None:
    session = llm.session()
    logits = session.forward(np.array(IDS))
    assert (logits.shape, logits.dtype) == ((SHAPE.vocab,), np.float32)
    assert int(logits.argmax()) == llm.generate(IDS, max_new_tokens=1).token_ids[0]
    assert (session.length, session.kinds.tolist()) == (50, [0] * 50)
    assert session.depths.tolist() == [SHAPE.n_layers] * 50
    session.forward([7], generated=True)
    assert session.kinds.tolist() == [0] * 50 + [1]
    assert "51 tokens" in repr(session)


def test_what_a_session_reports_is_a_copy(llm: LLM) -> None:
    session = llm.session(STAGES)
    session.forward(IDS)
    for name in ("depths", "kinds", "last_pass"):
        getattr(session, name)[:] = 99
        assert 99 not in getattr(session, name)
    assert session.last_pass.shape == (SHAPE.n_layers, 3)
    assert 0 < session.reached_top < session.computed < 1


def test_forward_grows_token_by_token_to_the_context(llm: LLM) -> None:
    session = llm.session()
    for token in range(130):
        logits = session.forward([token])
    assert np.allclose(logits, llm.session().forward(list(range(130))), atol=1e-5)
    with pytest.raises(
        ValueError, match="130 tokens in the session, 471 given and 0 to be generated make 601"
    ):
        session.forward([1] * 471)
    session.forward([1] * 470)
    assert session.length == 600


def test_a_follow_up_continues_the_same_context(llm: LLM) -> None:
    session = llm.session()
    first = session.ask("What is the sea?", max_new_tokens=5)
    second = session.ask(" And the wind?", max_new_tokens=5)
    follow_up = llm.tokenizer.encode(" And the wind?", add_special=False)
    whole = first.prompt_ids + first.token_ids + follow_up
    assert second.prompt_ids == follow_up
    assert second.token_ids == llm.generate(whole, max_new_tokens=5).token_ids
    assert session.length == len(whole) + 4
    kinds = [0] * len(first.prompt_ids) + [1] * 5 + [0] * len(follow_up) + [1] * 4
    assert session.kinds.tolist() == kinds


def test_a_chat_goes_on_by_its_template(llm: LLM) -> None:
    session = llm.session(STAGES)
    first = session.ask("Hello", chat=True, max_new_tokens=3)
    second = session.ask("And you?", chat=True, max_new_tokens=3)
    decode = llm.tokenizer.decode
    assert (
        decode(first.prompt_ids, skip_special_tokens=False) == "<s><turn>user\nHello</s>\n<turn>assistant\n"
    )
    assert decode(second.prompt_ids, skip_special_tokens=False) == (
        "</s>\n<turn>user\nAnd you?</s>\n<turn>assistant\n"
    )


def test_a_chat_that_ended_by_its_end_token_does_not_repeat_it(llm: LLM) -> None:
    session = llm.session()
    session.ask("Hello", chat=True, max_new_tokens=1)
    session._pending = [llm.tokenizer.eos_token_id]  # as if it had been sampled
    second = session.ask("And you?", chat=True, max_new_tokens=1)
    shown = llm.tokenizer.decode(second.prompt_ids, skip_special_tokens=False)
    assert shown == "\n<turn>user\nAnd you?</s>\n<turn>assistant\n"


def test_a_failed_ask_changes_nothing(llm: LLM) -> None:
    session = llm.session()
    session.ask("Hello", chat=True, max_new_tokens=2)
    before = session.length
    with pytest.raises(ValueError, match="the model's context is 600"):
        session.ask("And you?", chat=True, max_new_tokens=600)
    with pytest.raises(TypeError, match="chat=True needs"):
        session.ask(IDS, chat=True)
    assert session.length == before
    assert len(session.ask("And you?", chat=True, max_new_tokens=2).token_ids) == 2


def test_a_session_interrupted_after_its_pass_refuses_to_go_on(llm: LLM) -> None:
    """Ctrl-C may arrive after the core has run the tokens and before Python has recorded them."""
    session = llm.session()
    session.forward([5, 6])
    session.core.forward([7])
    for use in (lambda: session.forward([8]), lambda: session.ask("8", max_new_tokens=1)):
        with pytest.raises(RuntimeError, match="did not finish; open a new session"):
            use()


def test_messages_are_a_chat(llm: LLM) -> None:
    system, hello = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    session = llm.session(STAGES)
    first = session.ask([system, hello], chat=True, max_new_tokens=3)
    assert first.prompt_ids == llm.tokenizer.apply_chat_template([system, hello])
    correction = {"role": "assistant", "content": "Hi."}
    second = session.ask([correction, {"role": "user", "content": "And you?"}], chat=True, max_new_tokens=3)
    assert llm.tokenizer.decode(second.prompt_ids, skip_special_tokens=False) == (
        "</s>\n<turn>assistant\nHi.</s>\n<turn>user\nAnd you?</s>\n<turn>assistant\n"
    )


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied(llm: LLM, use: Any) -> None:
    with pytest.raises(TypeError, match=r"a session cannot be copied or pickled; open another one"):
        use(llm.session())


def test_room_grows_in_few_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt beyond the capacity doubles it, so that only few of many turns copy the cache."""

    class Counted:
        def __init__(self, core: Any) -> None:
            self.core = core
            self.rooms: list[int] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.core, name)

        def reserve(self, n_tokens: int) -> None:
            self.rooms.append(n_tokens)
            self.core.reserve(n_tokens)

    for turn in (
        lambda session: session.ask(IDS[:8], max_new_tokens=2),
        lambda session: session.forward(IDS[:10]),
    ):
        session = llm.session()
        session.core = counted = Counted(session.core)
        for _ in range(50):
            turn(session)
        assert session.length >= 499
        assert len(counted.rooms) <= 7
        assert counted.rooms[-1] <= llm.config.context


def test_two_threads_do_not_share_a_session(llm: LLM) -> None:
    """`forward` in a second thread is refused during a whole answer, also between its passes."""
    session = llm.session()
    stream = session.answer(IDS, lazyllm.generation.Request.checked(4, None, (), False, False))
    next(stream)
    refused: list[str] = []

    def forward() -> None:
        try:
            session.forward([5])
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert "this session is in use" in refused[0]
    assert stream.finished().token_ids == llm.generate(IDS, max_new_tokens=4).token_ids
    session.forward([5])
