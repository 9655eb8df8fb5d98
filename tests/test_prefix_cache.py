"""PrefixCache and `Session.read`: what prompts begin with is read once, and answers stay what they were."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import SHAPE, model_folder
from tiny import DEVICE, shared_bytes

import lazyllm
from lazyllm import LLM, Policy, PrefixCache, Preset, Pruning, Scoring, Session, prefix_cache
from lazyllm.methods.rivals import FastKV

MODEL = replace(SHAPE, context=2000)
DENSE = Pruning()
PRUNED = Pruning({1: 0.5, 3: 0.3}, scoring=Scoring(layers=2, queries=8, pooling="rms", memory=0.8))
RNG = np.random.default_rng(3)
PASS = prefix_cache.LEAST_READ
HEAD = RNG.integers(3, 300, 2 * PASS + 100).tolist()
TAILS = [RNG.integers(3, 300, n).tolist() for n in (PASS, 100, PASS + 80, 30, 700)]


both = pytest.mark.parametrize("pruning", [DENSE, PRUNED], ids=["dense", "pruned"])


def answered(llm: LLM, ids: list[int], pruning: Pruning, **options: Any) -> list[int]:
    return llm.generate(ids, pruning, max_new_tokens=6, **options).token_ids


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of prompt tokens of passes that sessions run from now on."""
    run: list[int] = []
    run_pass = Session.run_pass
    monkeypatch.setattr(
        Session, "run_pass", lambda *given: (given[3] and run.append(len(given[2]))) or run_pass(*given)
    )
    return run


@both
def test_a_beginning_is_read_apart_once_a_second_prompt_has_it(llm: LLM, pruning: Pruning, passes: list[int]) -> None:
    """A prompt that begins like none before runs in one pass; the third one reads nothing twice."""
    prompts = [HEAD + tail for tail in TAILS[:3]]
    want = [answered(llm, ids, pruning) for ids in prompts]
    passes.clear()
    cache = PrefixCache(eager=False)
    assert [answered(llm, ids, pruning, prefix=cache) for ids in prompts] == want
    first, second, third = TAILS[:3]
    assert passes == [len(HEAD + first), len(HEAD), len(second), len(third)]
    assert (cache.hits, cache.tokens_shared) == (1, len(HEAD))
    answered(llm, prompts[0], Pruning({1: 0.4}), prefix=cache)
    assert passes[4:] == [len(prompts[0])]  # another setting has remembered nothing


@both
def test_answers_are_those_without_the_cache(llm: LLM, pruning: Pruning, passes: list[int]) -> None:
    want = [llm.generate(HEAD + tail, pruning, max_new_tokens=6) for tail in TAILS]
    passes.clear()
    cache = PrefixCache()
    got = [llm.generate(HEAD + tail, pruning, max_new_tokens=6, prefix=cache) for tail in TAILS]
    assert sum(passes) < len(HEAD) + sum(map(len, TAILS)) + 4 * 64 < sum(len(HEAD + tail) for tail in TAILS)
    for answer, alone in zip(got, want, strict=True):
        assert (answer.token_ids, answer.prompt_ids) == (alone.token_ids, alone.prompt_ids)
        assert answer.n_given == alone.n_given
        assert answer.computed_series == pytest.approx(alone.computed_series, abs=1e-12)


def test_a_document_is_read_once_and_each_question_prunes_for_itself(llm: LLM) -> None:
    document = llm.session(PRUNED)
    document.read(HEAD)
    assert document.depths.tolist() == [2] * len(HEAD)
    for tail in TAILS:
        whole, question = llm.session(PRUNED), document.fork()
        want, got = whole.forward(HEAD + tail), question.forward(tail)
        assert question.depths.tolist() == whole.depths.tolist()
        assert got == pytest.approx(want, rel=1e-3, abs=1e-4)
        assert DEVICE != "cpu" or got.tobytes() == want.tobytes()
    assert document.depths.tolist() == [2] * len(HEAD)


def test_settings_and_models_do_not_mix(llm: LLM, tmp_path: Path) -> None:
    other = lazyllm.load(model_folder(tmp_path, replace(MODEL, seed=9)), threads=1)
    cache = PrefixCache()
    for model, pruning in [(llm, DENSE), (llm, PRUNED), (other, DENSE), (llm, DENSE), (other, PRUNED)]:
        ids = HEAD + TAILS[0]
        assert answered(model, ids, pruning, prefix=cache) == answered(model, ids, pruning)


def test_the_one_used_longest_ago_goes_first(llm: LLM, passes: list[int]) -> None:
    prompts = [RNG.integers(3, 300, 600).tolist() for _ in range(3)]
    size = llm.session().core.bytes_for(599)
    cache = PrefixCache(max_bytes=2 * size)
    for which in (0, 1, 0, 2, 0, 1):  # 2 takes the place of 1
        passes.clear()
        answered(llm, prompts[which], DENSE, prefix=cache)
        assert cache.bytes <= 2 * size
    assert passes == [599, 1]


def test_what_has_no_room_replaces_nothing(llm: LLM, passes: list[int]) -> None:
    prompts = [RNG.integers(3, 300, n).tolist() for n in (600, 1200)]
    cache = PrefixCache(llm.session().core.bytes_for(600))
    answered(llm, prompts[0], DENSE, prefix=cache)
    with pytest.warns(UserWarning, match="needs more than max_bytes"):
        assert answered(llm, prompts[1], DENSE, prefix=cache) == answered(llm, prompts[1], DENSE)
    passes.clear()
    answered(llm, prompts[0], DENSE, prefix=cache)
    assert passes == [1]


def test_an_answer_needs_no_memory_for_forks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> Any:
        raise MemoryError("a fork needs more")

    cache, want = PrefixCache(), answered(llm, HEAD + TAILS[0], PRUNED)
    with monkeypatch.context() as patched:
        patched.setattr(Session, "forked_core", refused)
        with pytest.warns(UserWarning, match="the PrefixCache does not keep .* a fork needs more"):
            assert answered(llm, HEAD + TAILS[0], PRUNED, prefix=cache) == want
    assert cache.bytes == 0


@pytest.mark.skipif(DEVICE != "cpu", reason="forks share memory on the CPU only")
def test_shared_memory_holds_the_beginning_alone(llm: LLM) -> None:
    before, cache = shared_bytes(), PrefixCache()
    answered(llm, HEAD + TAILS[0], DENSE, prefix=cache)
    by_cache, session = shared_bytes() - before, llm.session()
    session.read((HEAD + TAILS[0])[:-1])
    fork = session.fork()
    assert shared_bytes() - before == 2 * by_cache > 0
    assert fork.length == session.length


def test_an_interrupted_answer_goes_on(llm: LLM) -> None:
    cache = PrefixCache()
    want = answered(llm, HEAD + TAILS[1], PRUNED)
    for stops_at in range(4):
        stream = llm.stream(HEAD + TAILS[1], PRUNED, max_new_tokens=6, prefix=cache)
        for _ in range(stops_at):
            next(stream, None)
        stream.close()
        assert answered(llm, HEAD + TAILS[1], PRUNED, prefix=cache) == want


def test_only_an_empty_session_takes_from_the_cache(llm: LLM) -> None:
    cache, session = PrefixCache(), llm.session(prefix=PrefixCache())
    session.read(HEAD)
    assert (session.forward(TAILS[0]) == llm.session().forward(HEAD + TAILS[0])).all()
    session = llm.session(prefix=cache)
    session.read(HEAD)
    assert session.ask(TAILS[0], max_new_tokens=3).prompt_ids == TAILS[0]


@pytest.mark.parametrize("ask", [Session.forward, Session.ask])
@pytest.mark.parametrize("n_ended", [0, 1])
def test_a_prompt_that_is_interrupted_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, ask: Any, n_ended: int
) -> None:
    """In its first pass, which the cache is given, or in the last one."""
    cache = PrefixCache()
    answered(llm, HEAD + TAILS[0], PRUNED, prefix=cache)
    session = llm.session(PRUNED, prefix=cache)
    passes: list[int] = []

    def interrupted(n: int, *_: Any) -> Any:
        if len(passes) == n_ended:
            raise KeyboardInterrupt
        passes.append(n)
        return contextlib.nullcontext()

    with monkeypatch.context() as patched:
        patched.setattr("lazyllm.session.prefill_watch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(session, HEAD + TAILS[4])
    assert session.length == 0
    other = TAILS[4]
    assert session.ask(other, max_new_tokens=6).token_ids == answered(llm, other, PRUNED)


class Asking(Policy):
    queries = 300

    def __init__(self, rows: int) -> None:
        super().__init__({1: 0.5})
        self.rows = rows

    def score(self, view: Any) -> Any:
        return view.attention(self.rows).mean(axis=(0, 1))


@pytest.mark.filterwarnings("ignore:the preset was made")
def test_the_last_pass_has_all_rows_that_are_asked(llm: LLM, passes: list[int]) -> None:
    ids = HEAD + TAILS[4]
    preset = Preset(Pruning({1: 0.5}, scoring=Scoring(queries=300)), 1.0, "", "", {}, {})
    for method, n_rows in ((preset, 300), (Asking(9), 300), (FastKV(1, 0.5), 8), (PRUNED, 8), (DENSE, 1)):
        passes.clear()
        llm.session(method, PrefixCache()).forward(ids)
        assert passes == [len(ids) - n_rows, n_rows]
    assert answered(llm, ids, Asking(300), prefix=PrefixCache()) == answered(llm, ids, Asking(300))
    with pytest.raises(ValueError, match="asked for 301 rows, not 300 or fewer: set queries = 301"):
        answered(llm, ids, Asking(301))


def test_threads_share_a_cache(llm: LLM) -> None:
    cache = PrefixCache()
    want = [answered(llm, HEAD + tail, PRUNED) for tail in TAILS]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda tail: answered(llm, HEAD + tail, PRUNED, prefix=cache), TAILS * 3))
    assert got == want * 3


@pytest.mark.parametrize("pruning", [lazyllm.RandomDrop(keep=0.5), Pruning({1: lazyllm.Drop(0.5)})], ids=str)
def test_refused_settings(llm: LLM, pruning: Any) -> None:
    for open_session in (llm.session, lambda *given, **named: llm.generate(HEAD, *given, **named)):
        with pytest.raises(ValueError, match="prompts cannot be read in parts, as prefix=<PrefixCache"):
            open_session(pruning, prefix=PrefixCache())
    with pytest.raises(ValueError, match="prompts cannot be read in parts with"):
        llm.session(pruning).read(HEAD)


def test_refused_arguments(llm: LLM) -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        PrefixCache(max_bytes=0)
    assert PrefixCache(max_bytes=2**40).max_bytes == 2**40
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.session().read([])
