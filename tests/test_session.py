"""Sessions: growing contexts, chats, memory, interruption, and use from several threads."""

import copy
import functools
import itertools
import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import IDS, STAGES, model_folder

import lazyllm
from lazyllm import LLM, Pruning, Session
from lazyllm.generation import Request
from lazyllm.machine import memory


def test_forward_grows_token_by_token_to_the_context(llm: LLM) -> None:
    session = llm.session()
    for token in range(130):
        logits = session.forward([token])
    assert np.allclose(logits, llm.session().forward(list(range(130))), atol=1e-5)
    with pytest.raises(ValueError, match="130 in the session, 471 given and 0 to be generated make 601"):
        session.forward([1] * 471)
    session.forward(np.ones(470, int))
    assert session.length == 600
    assert "600 tokens" in repr(session)


def test_a_template_that_leaves_answers_out_has_no_follow_up(tmp_path: Path) -> None:
    config = model_folder(tmp_path) / "tokenizer_config.json"
    last = {"chat_template": "{{ messages[-1]['content'] }}"}
    config.write_text(json.dumps(json.loads(config.read_text()) | last))
    session = lazyllm.load(config.parent, threads=1).session()
    session.ask("Hi", chat=True, max_new_tokens=2)
    with pytest.raises(ValueError, match="the chat template leaves earlier answers out"):
        session.ask("Why?", chat=True, max_new_tokens=2)


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
    correction = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Why?"}]
    for prompt, text in (
        ("Hello", "<s><turn>user\nHello</s>\n<turn>assistant\n"),
        ("And you?", "</s>\n<turn>user\nAnd you?</s>\n<turn>assistant\n"),
        (correction, "</s>\n<turn>assistant\nHi.</s>\n<turn>user\nWhy?</s>\n<turn>assistant\n"),
    ):
        ids = session.ask(prompt, chat=True, max_new_tokens=3).prompt_ids
        assert llm.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("chats", [False, True])
def test_a_chat_turn_follows_turns_only(llm: LLM, chats: bool) -> None:
    base = llm.session()
    if chats:
        base.ask("Hello", chat=True, max_new_tokens=2)
    begins = base.length + chats  # the answer's last token is run first
    want = base.fork().ask("And you?", chat=True, max_new_tokens=2).token_ids
    outside: list[Any] = [
        lambda session: session.ask("A document.", max_new_tokens=2),
        lambda session: session.read("A document."),
        lambda session: session.forward(IDS),
        lambda session: session.forward([7], generated=not session.length),
    ]
    for run in outside:
        session = base.fork()
        run(session)
        for asked in (session, session.fork()):
            with pytest.raises(ValueError, match="a chat turn cannot follow part of a turn, or text"):
                asked.ask("And you?", chat=True, max_new_tokens=2)
        session.truncate(begins)
        assert session.ask("And you?", chat=True, max_new_tokens=2).token_ids == want


def test_a_refused_call_changes_nothing(llm: LLM) -> None:
    """An interrupted answer goes on waiting, too."""
    session = llm.session(Pruning({1: 0.999}))
    want = llm.session(Pruning({1: 0.999})).ask("Hello", chat=True, max_new_tokens=6)
    stream = session.answer("Hello", Request(6, chat=True, progress=False))
    next(stream)
    stream.close()
    before = state(session)
    with pytest.raises(ValueError, match="the model's context is 600"):
        session.ask("And you?", chat=True, max_new_tokens=600)
    with pytest.raises(TypeError, match="chat=True needs"):
        session.ask(IDS, chat=True)
    with pytest.raises(ValueError, match="surprisal needs a session without pruning"):
        session.surprisal([4])
    assert state(session) == before
    assert session.resume().token_ids == want.token_ids
    with pytest.raises(RuntimeError, match="no answer of this session waits"):
        session.resume()


# ---- fork and truncate -----------------------------------------------------------------------------------


def state(session: lazyllm.Session) -> tuple[Any, ...]:
    core = session.core
    return core.ids.tolist(), core.depths.tolist(), core.kinds.tolist(), core.drawn, session.computed


def test_prompts_continue_a_prefix(llm: LLM) -> None:
    """Several questions on one document: each fork answers as the session would, and changes no other."""
    base, questions = llm.session(STAGES), [IDS[:5], IDS[20:30], [7]]
    base.ask(IDS, max_new_tokens=3)
    before = state(base)
    forks = [base.fork() for _ in questions]
    of_forks = [fork.ask(ids, max_new_tokens=6) for fork, ids in zip(forks, questions, strict=True)]
    answers = llm.generate(questions, max_new_tokens=6, prefix=base, progress=False)
    assert state(base) == before
    for ids, *both in zip(questions, of_forks, answers, strict=True):
        alone = llm.session(STAGES)
        alone.ask(IDS, max_new_tokens=3)
        want = alone.ask(ids, max_new_tokens=6)
        for got in both:
            assert got.token_ids == want.token_ids
            assert got.passes.tolist() == want.passes.tolist()
            assert (got.computed, got.reached_top) == (want.computed, want.reached_top)
            assert got.pruning == STAGES
    assert llm.generate([7], STAGES, max_new_tokens=6, prefix=base).token_ids == want.token_ids
    assert llm.stream([7], max_new_tokens=6, prefix=base).finished().token_ids == want.token_ids


def test_what_is_no_prefix(llm: LLM, folder: Path) -> None:
    base = llm.session(STAGES)
    base.forward(IDS)
    other = lazyllm.load(folder, device="cpu").session()
    for prefix in ("text", other):
        with pytest.raises(ValueError, match="prefix must be a session of this model or a PrefixCache, not "):
            llm.generate([5], prefix=prefix)
    with pytest.raises(ValueError, match="but the prefix was read with"):
        llm.generate([5], {1: 0.5}, prefix=base)
    with pytest.raises(ValueError, match=r"prompt 1: .* make 651 tokens; the model's context is 600"):
        llm.generate([[5], [5] * 597], prefix=base, max_new_tokens=4)


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_that_repeats_its_prefix_is_refused(llm: LLM, chat: bool) -> None:
    """Whole prompts belong in a PrefixCache; behind a prefix its text would stand twice."""
    prefix, whole = llm.session(), "The sea was calm. And the wind?"
    options: dict[str, Any] = {"prefix": prefix, "chat": chat, "max_new_tokens": 2, "progress": False}
    prompts: list[Any] = [whole, llm.tokenizer.encode(whole)]
    fitting: list[Any] = ["The sea", "And the sea was calm.", llm.tokenizer.encode("The wind")]
    if chat:
        hello = {"role": "user", "content": "Hello"}
        answer = {"role": "assistant", "content": prefix.ask([hello], max_new_tokens=2).text}
        prompts, fitting = [[hello, answer, {"role": "user", "content": "Why?"}]], ["Hello", [hello]]
    else:
        prefix.read("The sea was calm.")
    for prompt in prompts:
        for ask in (llm.generate, llm.stream):
            with pytest.raises(ValueError, match="the prompt begins with what the prefix holds"):
                ask(prompt, **options)
    assert len(llm.generate(fitting, **options)) == len(fitting)
    prefix.truncate(0)
    llm.generate(prompts[0], **options)


def test_truncate_asks_again(llm: LLM) -> None:
    session = llm.session(STAGES)
    session.forward(IDS)
    before = state(session)
    first = session.ask([5, 6], max_new_tokens=4)
    session.truncate(len(IDS))
    assert session.length == len(IDS)
    assert state(session)[0] == before[0]
    assert session.core.drawn is None
    again = session.ask([5, 6], max_new_tokens=4)
    assert again.prompt_ids == first.prompt_ids
    session.truncate(0)
    assert (session.length, session.computed) == (0, 0.0)
    want = llm.generate(IDS, STAGES, max_new_tokens=4).token_ids
    assert session.ask(IDS, max_new_tokens=4).token_ids == want


def test_a_truncated_chat_goes_on_between_its_turns(llm: LLM) -> None:
    session = llm.session()
    first = session.ask("Hello", chat=True, max_new_tokens=3)
    end = session.length
    want = session.ask("And you?", chat=True, max_new_tokens=3)
    session.truncate(end + 3)
    with pytest.raises(ValueError, match=r"cannot follow part of a turn.* truncate to where that begins"):
        session.ask("And you?", chat=True, max_new_tokens=3)
    session.truncate(end + 1)  # the first answer's last token included
    again = session.ask("And you?", chat=True, max_new_tokens=3)
    assert (again.prompt_ids, again.token_ids) == (want.prompt_ids, want.token_ids)
    session.truncate(len(first.prompt_ids) + 1)  # within the first answer
    cut = session.ask("And you?", chat=True, max_new_tokens=3)
    assert cut.prompt_ids == want.prompt_ids
    session.truncate(len(first.prompt_ids) - 2)  # within the first turn's messages
    session.forward([1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="cannot follow part of a turn"):
        session.ask("And you?", chat=True, max_new_tokens=3)
    session.truncate(0)
    assert session.ask("Hello", chat=True, max_new_tokens=3).token_ids == first.token_ids


def test_shares_of_a_prompt_that_was_cut(llm: LLM) -> None:
    """Removed tokens of a prompt that a method has shortened count in proportion to the remaining ones."""
    session = llm.session(lazyllm.RandomDrop(0.5, 0))
    session.forward(IDS)
    assert session.computed == pytest.approx(0.5)
    session.truncate(10)
    assert session.computed == pytest.approx(0.5)
    session.truncate(0)
    session.forward(IDS)
    assert session.computed == pytest.approx(0.5)


# ---- answers that are interrupted ------------------------------------------------------------------------

STEPS = {"_advance", "_run_prompt", "prompt", "reserve", "run_pass", "_take", "_record", "_read", "_show"}
SAMPLED = lazyllm.SamplingParams(1.0, seed=3)


def interrupt_at(n: int, call: Any) -> BaseException | None:
    """Calls, and raises KeyboardInterrupt when the n-th line of an answer's steps begins; what it raised."""
    seen = 0

    def line(frame: Any, event: str, argument: Any) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == n:
                raise KeyboardInterrupt
        return line

    def entered(frame: Any, event: str, argument: Any) -> Any:
        ours = frame.f_code.co_name in STEPS and "lazyllm" in frame.f_code.co_filename
        return line if ours else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        call()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
    return None


@pytest.mark.parametrize("drawn_in_python", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_may_be_interrupted_at_any_line(llm: LLM, chat: bool, drawn_in_python: bool) -> None:
    """It goes on by `resume`, or can be asked for anew, and is then what it would have been. Between a pass
    and a draw in Python no token is known; `resume` draws it from the pass's logits."""
    base = llm.session(STAGES)
    if not chat:  # else the first turn is interrupted
        base.ask(IDS, max_new_tokens=2)
    request = Request(3, SAMPLED, chat=chat, trace=True, progress=False)
    if drawn_in_python:
        request = replace(request, never_first=frozenset([299]))

    def ask(session: lazyllm.Session) -> Any:
        return session.answer("And the wind?" if chat else IDS[:9], request).finished()

    def seen(session: lazyllm.Session, answer: Any) -> tuple[Any, ...]:
        follow_up = session.ask("Why?" if chat else [5], chat=chat, max_new_tokens=2)
        counts = answer.passes.tolist(), len(answer.trace.passes), answer.computed_series.tolist()
        follow_ups = follow_up.prompt_ids, follow_up.token_ids
        return answer.text, answer.token_ids, counts, *follow_ups, state(session)

    session = base.fork()
    want = seen(session, ask(session))
    resumed = anew = undrawn = 0
    for n in itertools.count(1):
        session = base.fork()
        error = interrupt_at(n, functools.partial(ask, session))
        if error is None:
            break
        partial = getattr(error, "generation", None)
        if partial:
            whole = len(partial.token_ids) == len(want[1])
            assert partial.token_ids == want[1][: len(partial.token_ids)]
            assert partial.finish_reason == ("length" if whole else "interrupted")
            assert error.session is session
            assert partial.token_ids[-1] == session.core.drawn
        if session.unfinished:
            resumed += 1
            undrawn += partial is None
            assert partial or session.core.drawn is None
            if chat and partial:  # which goes on from the part of the answer, too
                follow_up = session.fork().ask("Why?", chat=True, max_new_tokens=1)
                assert follow_up.prompt_ids == want[3]
            assert seen(session, session.resume()) == want
        else:
            anew += 1
            assert partial is None
            got = seen(session, ask(session))
            assert got[:2] + got[3:] == want[:2] + want[3:]  # the token before may have been run already
    assert resumed > 30
    assert anew > 5
    assert (undrawn > 0) == drawn_in_python


def test_truncation_forgets_an_interrupted_answer(llm: LLM) -> None:
    session = llm.session()
    session.ask(IDS, max_new_tokens=2)
    next(session.answer([5], Request(4, progress=False)))
    session.truncate(50)
    with pytest.raises(RuntimeError, match="no answer of this session waits"):
        session.resume()


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied(llm: LLM, use: Any) -> None:
    with pytest.raises(TypeError, match=r"use fork\(\) or"):
        use(llm.session())


def test_room_grows_in_few_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt beyond the capacity doubles it, so that only few of many turns copy the cache."""
    rooms: list[int] = []

    def counted(*given: Any) -> int:
        rooms.append(memory.reserve(*given))
        return rooms[-1]

    monkeypatch.setattr("lazyllm.session.reserve", counted)
    session = llm.session()
    for turn in range(50):
        session.ask(IDS[:8], max_new_tokens=2) if turn % 2 else session.forward(IDS[:10])
    assert session.length >= 499
    assert len(rooms) <= 7
    assert rooms[-1] <= llm.config.context


def test_a_session_serves_one_caller(llm: LLM) -> None:
    """Every call is refused during a whole answer, also between its passes, in this thread and in others."""
    session = llm.session()
    stream = session.answer(IDS, Request(4, progress=False))
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        for call in (
            lambda: session.forward([5]),
            lambda: session.ask([5]),
            lambda: session.truncate(0),
            session.fork,
            lambda: session.save("kept"),
        ):
            for run in (call, lambda call=call: pool.submit(call).result()):
                with pytest.raises(RuntimeError, match="this session is in use"):
                    run()
    assert stream.finished().token_ids == llm.generate(IDS, max_new_tokens=4).token_ids
    session.forward([5])


# ---- where truncation, interruption and chats meet --------------------------------------------------------


def test_an_end_token_is_in_the_context_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    session = llm.session()
    session.ask("Hello", chat=True, max_new_tokens=1)
    session.core.drawn = llm.tokenizer.eos_token_id  # as if it had been sampled; it waits to be run
    interrupted = session.fork()
    begins = session.length + 1
    want = session.ask("And you?", chat=True, max_new_tokens=3)
    shown = llm.tokenizer.decode(want.prompt_ids, skip_special_tokens=False)
    assert shown == "\n<turn>user\nAnd you?</s>\n<turn>assistant\n"
    session.truncate(begins)
    again = session.ask("And you?", chat=True, max_new_tokens=3)
    assert (again.prompt_ids, again.token_ids) == (want.prompt_ids, want.token_ids)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "run_pass", interrupt)
        with pytest.raises(KeyboardInterrupt):
            interrupted.ask("And you?", chat=True, max_new_tokens=3)
    again = interrupted.ask("And you?", chat=True, max_new_tokens=3)
    assert (again.prompt_ids, again.token_ids) == (want.prompt_ids, want.token_ids)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
