"""The generation loop: where answers end, their text and its pieces, and their reports."""

import math
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import IDS, SHAPE, STAGES, model_folder
from hypothesis import given
from hypothesis import strategies as st
from test_pruning import flops_token_by_token

import lazyllm
from lazyllm import LLM, Drop, Mass, Pruning, SamplingParams, Scoring, _core
from lazyllm.answer import shown
from lazyllm.generation import Request

# ---- where an answer ends --------------------------------------------------------------------------


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_stop_strings_are_found_however_the_text_comes(text: str, stops: list[str], size: int) -> None:
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    certain, held, found = "", "", False
    for piece in pieces:
        n, found = shown(held + piece, stops)
        certain, held = certain + (held + piece)[:n], (held + piece)[n:]
        assert text.startswith(certain)
        if found:
            break
    assert found == any(stop in text for stop in stops)
    if not found:
        assert certain + held == text
        assert held == "" or any(stop.startswith(held) for stop in stops)
        return
    assert any(text[len(certain) :].startswith(stop) for stop in stops)
    assert not any(stop in certain for stop in stops)


def test_a_stop_string_ends_the_answer(llm: LLM) -> None:
    whole = llm.generate(IDS, max_new_tokens=30)
    stop = whole.text[8:11]
    made = llm.generate(IDS, max_new_tokens=30, stop=stop)
    assert made.text == whole.text[: whole.text.index(stop)]
    assert made.finish_reason == "stop"
    assert len(made.token_ids) < 30
    assert llm.generate(IDS, max_new_tokens=30, stop=["nowhere", stop]).text == made.text
    assert "".join(llm.stream(IDS, max_new_tokens=30, stop=stop)) == made.text
    unused = llm.generate(IDS, max_new_tokens=30, stop=whole.text[-2:] + "never")
    assert (unused.text, unused.finish_reason) == (whole.text, "length")


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=3)])
def test_forbidden_tokens_are_never_drawn_first(llm: LLM, sampling: SamplingParams) -> None:
    logits = llm.session(STAGES).forward(IDS)
    likely = logits.argsort()[::-1][:150]
    assert llm.generate(IDS, STAGES, max_new_tokens=1, sampling=sampling).token_ids[0] in likely
    request = Request(8, sampling, progress=False, never_first=frozenset(likely.tolist()))
    first, *more = llm.session(STAGES).answer(IDS, request).finished().token_ids
    logits[likely] = -np.inf
    sampler = _core.Sampler(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed or 0)
    assert first == sampler.sample(logits)
    assert {*more} & {*likely.tolist()}  # later tokens are free


def test_an_end_token_ends_the_answer(tmp_path: Path, llm: LLM) -> None:
    drawn = llm.generate(IDS, max_new_tokens=10).token_ids
    place = next(i for i, token in enumerate(drawn) if i and token not in drawn[:i])
    ending = lazyllm.load(model_folder(tmp_path, eos=drawn[place]), threads=1)
    made = ending.generate(IDS, max_new_tokens=10)
    assert made.token_ids == drawn[: place + 1]
    assert made.finish_reason == "stop"
    assert made.text == llm.tokenizer.decode(drawn[:place])


# ---- text and sampling -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_pieces_never_split_a_character(llm: LLM, seed: int) -> None:
    """A random byte-level model generates invalid UTF-8; the pieces still join to the whole text."""
    sampling = SamplingParams(temperature=1.0, seed=seed)
    stream = llm.stream(IDS, max_new_tokens=60, sampling=sampling)
    pieces = list(stream)
    made = stream.finished()
    assert "".join(pieces) == made.text == llm.tokenizer.decode(made.token_ids)
    shown = [token for token in made.token_ids if token not in llm.tokenizer.special]
    raw = b"".join(map(llm.tokenizer.vocabulary.token_bytes, shown))
    assert made.text == raw.decode("utf-8", errors="replace")


def test_the_least_top_k_and_top_p_are_greedy(llm: LLM) -> None:
    greedy = llm.generate(IDS, max_new_tokens=20).token_ids
    for options in ({"top_k": 1}, {"top_p": 1e-9}):
        sampling = SamplingParams(temperature=1.0, seed=5, **options)
        assert llm.generate(IDS, max_new_tokens=20, sampling=sampling).token_ids == greedy


def test_each_answer_has_draws_of_its_own_and_tells_their_seed(llm: LLM) -> None:
    def drawn(prompt: Any, seed: int | None = None) -> Any:
        return llm.generate(prompt, max_new_tokens=8, sampling=SamplingParams(1.0, seed=seed), progress=False)

    last = 2**63 - 1
    free, seeded = [drawn(IDS), drawn(IDS), *drawn([IDS, IDS])], drawn([IDS, IDS, IDS], seed=last)
    assert [answer.seed for answer in seeded] == [last, 0, 1]
    answers = [*free, *seeded]
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)
    for answer in answers:
        again = drawn(IDS, seed=answer.seed)
        assert (again.token_ids, again.seed) == (answer.token_ids, answer.seed)
        assert f", seed {answer.seed}" in answer.summary
    greedy = llm.generate(IDS, max_new_tokens=1)
    assert greedy.seed is None
    assert "seed" not in greedy.summary


def test_streaming_gives_what_generating_gives(llm: LLM) -> None:
    made = llm.generate(IDS, pruning=STAGES, max_new_tokens=12)
    stream = llm.stream(IDS, pruning=STAGES, max_new_tokens=12)
    assert stream.generation is None
    assert "".join(stream) == made.text
    assert stream.generation is not None
    assert stream.generation.token_ids == made.token_ids
    assert list(stream) == []
    left_early = llm.stream(IDS, max_new_tokens=50)
    next(left_early)
    left_early.close()
    assert list(left_early) == []
    with pytest.raises(RuntimeError, match="closed or failed before its end"):
        left_early.finished()


# ---- reports ---------------------------------------------------------------------------------------


def test_passes_have_a_row_for_each_pass_and_layer(llm: LLM) -> None:
    """And shares agree with them."""
    made = llm.generate(IDS, pruning=STAGES, max_new_tokens=9)
    passes = made.passes.reshape(9, SHAPE.n_layers)
    assert passes.dtype.names == ("pass_", "layer", "in_play", "computed", "revived")
    assert passes[0]["layer"].tolist() == list(range(SHAPE.n_layers))
    assert passes[0]["in_play"].tolist() == passes[0]["computed"].tolist() == [50, 50, 30, 30, 15, 15]
    assert not passes[0]["revived"].any()
    assert (passes["computed"] >= 1).all()
    assert passes["revived"].sum() > 0
    of_prompt = np.cumsum(passes["computed"].sum(axis=1) - np.where(np.arange(9) > 0, SHAPE.n_layers, 0))
    assert made.computed_series == pytest.approx(of_prompt / (50 * SHAPE.n_layers))
    assert (made.computed, made.reached_top) == (made.computed_series[-1], made.reached_top_series[-1])
    assert (np.diff([made.computed_series, made.reached_top_series]) >= 0).all()
    assert made.reached_top_series[0] == 15 / 50
    assert 0 < made.ttft < made.seconds


def test_dense_computes_everything_at_once(llm: LLM) -> None:
    made = llm.generate(IDS, max_new_tokens=1)
    assert made.computed_series.tolist() == made.reached_top_series.tolist() == [1.0]
    assert (made.speedup, made.unpruned, made.pruning, made.recorded) == (1.0, "", Pruning(), None)
    assert "nothing was dropped" not in made.summary
    assert made.ttft == made.seconds


def test_counted_tokens_in_play_are_those_of_the_engine(llm: LLM) -> None:
    """Counted work uses the number of tokens in play per layer, which must equal the engine's."""
    for pruning in (
        Pruning({0: 0.7, 2: 0.4}),
        Pruning({0: 0.2, 2: 0.1}, sink=9, window=4),
        Pruning({1: 0.5}, protect=[(3, 20), (10, 40)]),
        Pruning({1: 0.5}, min_tokens=51),
        Pruning({1: 0.5, 2: 0.31}, scoring=Scoring(smooth=5, queries=3)),
        Pruning({2: 0.31}, scoring=Scoring(layers=2)),
    ):
        session, n = llm.session(pruning), len(IDS)
        session.forward(IDS)
        assert pruning.flops(llm.config, n) == flops_token_by_token(pruning, llm.config, n)
        assert pruning.flops(llm.config, n) == pruning.pass_flops(llm.config, session.last_pass)


def test_counted_work_of_a_decode_step(llm: LLM) -> None:
    c = llm.config
    width, kv_width = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    row = 4 * c.hidden * width + 6 * c.hidden * c.ffn
    stages = Pruning({1: 0.5}, decode={0: 0.5})
    for pruning, in_play, scored in (
        (Pruning(), [len(IDS) + 1] * c.n_layers, 0),
        (stages, [len(IDS) + 1] + [math.ceil(0.5 * len(IDS)) + 1] * (c.n_layers - 1), len(IDS) + 1),
    ):
        session = llm.session(pruning)
        session.forward(IDS)
        session.forward([5], generated=True)
        last = session.last_pass
        assert last[:, 0].tolist() == in_play
        work = 2 * c.hidden * c.vocab + 2 * width * scored
        for (m, n, _), rows in zip(last.tolist(), [*last[1:, 1].tolist(), 1], strict=True):
            work += n * 4 * c.hidden * kv_width + rows * row
            work += 4 * width * sum(range(m - rows + 1, m + 1))
        assert pruning.pass_flops(c, last, generated=True) == work


@pytest.mark.parametrize("least", [0, 60, 100, 300])
def test_counted_work_where_tokens_are_gone(llm: LLM, least: int) -> None:
    """The context of a follow-up counts for min_tokens, of which fewer tokens are in play."""
    made, told = (Pruning({1: Drop(0.3)}, min_tokens=n) for n in (least, 0))
    session = llm.session(made)
    for ids in (IDS, IDS, IDS[:3]):
        session.forward(ids)
        dense = session.length < least
        counted = Pruning() if dense else told
        last = session.last_pass
        assert made.pass_flops(llm.config, last) == counted.pass_flops(llm.config, last)


def test_a_follow_up_reports_its_own_passes(llm: LLM) -> None:
    """One pass runs the last token of the first answer. A follow-up computes few tokens, so that little is
    saved."""
    session = llm.session(STAGES)
    first = session.ask(IDS, max_new_tokens=4)
    made = session.ask(IDS[:10], max_new_tokens=2)
    passes = made.passes.reshape(3, SHAPE.n_layers)
    n_context = 50 + 4 + 10
    assert passes["in_play"][1, 0] == n_context
    assert made.computed == session.computed
    pruned = STAGES.pass_flops(llm.config, np.stack([passes["in_play"][1], passes["computed"][1]], axis=1))
    dense = Pruning().pass_flops(llm.config, np.tile([n_context, 10], (SHAPE.n_layers, 1)))
    assert made.speedup == dense / pruned
    assert first.speedup > made.speedup


# ---- what pruning saved of a prompt ------------------------------------------------------------------------


OF_A_LAYER = [f"{name}:layer=2,keep=0.5" for name in ("static", "fastkv", "claa", "gemfilter")]


@pytest.mark.parametrize("method", [STAGES.to_json(), "random:keep=0.5", *OF_A_LAYER])
def test_the_speedup_of_a_prompt_is_that_of_the_setting(llm: LLM, method: str) -> None:
    made = llm.generate(IDS, method, max_new_tokens=3)
    setting: Any = lazyllm.parse_method(method)
    assert made.speedup == pytest.approx(setting.speedup(llm.config, len(IDS)))
    assert made.speedup != 1.0
    assert (made.unpruned, "nothing was dropped" in made.summary) == ("", False)


def test_a_beginning_read_before_counts_like_the_rest_of_its_prompt(llm: LLM) -> None:
    whole = llm.generate(IDS, STAGES, max_new_tokens=2)
    session = llm.session(STAGES)
    session.read(IDS[:30])
    assert session.ask(IDS[30:], max_new_tokens=2).speedup == whole.speedup
    ids = [*range(250), *range(250)]
    cache = lazyllm.PrefixCache()
    made = [llm.generate(ids, STAGES, max_new_tokens=2, prefix=prefix) for prefix in (None, cache, cache)]
    assert made[2].passes["computed"][0] < made[0].passes["computed"][0]  # the rest was read before
    assert len({answer.speedup for answer in made}) == 1


KEPT = "its stages, sink, window and protect keep all {} tokens of the prompt"


def test_an_answer_says_why_nothing_was_dropped(llm: LLM) -> None:
    for pruning, n, reason in (
        (
            Pruning({1: 0.5}, min_tokens=3000),
            50,
            "contexts of fewer than 3000 prompt tokens run dense (min_tokens), and this one has 50",
        ),
        (Pruning({1: 0.5}, sink=10), 5, KEPT.format(5)),
        (Pruning({1: 1.0}), 50, KEPT.format(50)),
        (Pruning({1: 0.95}), 5, KEPT.format(5)),
        (Pruning({}, window=3), 50, KEPT.format(50)),
        (Pruning({1: Mass(1.0)}), 50, "no stage found a token to drop"),
        ("random:keep=1", 50, "random found no token to drop"),
    ):
        made = llm.generate(IDS[:n], pruning, max_new_tokens=2)
        assert (made.speedup, made.unpruned) == (1.0, reason)
        assert f"nothing was dropped: {reason}" in made.summary
        assert reason in unescape(made._repr_html_())
    drops_later = llm.generate(IDS, Pruning({}, decode={1: 0.5}), max_new_tokens=3)
    assert (drops_later.speedup, drops_later.unpruned) == (1.0, "")


def test_work_that_cannot_be_counted_has_no_speedup(llm: LLM) -> None:
    class LastHalf(lazyllm.Method):
        def ids(self, llm: Any, prompt_ids: list[int], turn: int) -> list[int]:
            return prompt_ids[len(prompt_ids) // 2 :]

    assert llm.generate(IDS, LastHalf(), max_new_tokens=2).speedup is None
