"""The methods that Pruning is compared with: reference, hand-worked cases, and refused arguments."""

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from comparison import drive, per_layer
from folders import IDS, model_folder
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import Reference, log_softmax
from tiny import DEVICE, Build, Shape, pruning
from tolerances import NEAR_TIE, error

import lazyllm
from lazyllm import (
    CLAA,
    LLM,
    Drop,
    ExpectedAttention,
    FastKV,
    GemFilter,
    Mass,
    PromptCompression,
    Pruning,
    RandomDrop,
    SnapKV,
    StaticPruning,
    parse_method,
)
from lazyllm.methods.compression import kept, self_information, sentence_ends

EXAMPLES = settings().max_examples
SURPRISAL = 1e-5  # tolerance, relative to the largest value
TEXT = "The sea was calm. Nobody saw the boat! Was it there? The harbour slept."


def static(layers: int, keep: Any, **options: Any) -> dict[str, Any]:
    return pruning([(layers - 1, keep, True)], average=True, **{"decode": [], **options})


# ---- static token pruning: the engine --------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> Shape:
    return Shape(
        seed=draw(st.integers(0, 3)),
        n_layers=draw(st.integers(2, 6)),
        n_kv_heads=draw(st.sampled_from([1, 2, 4])),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
    )


TURNS = st.sampled_from([[(1, True)], [(1, True)] * 5, [(3, True)], [(1, False)], [(9, False)], [(30, False)]])


@settings(max_examples=EXAMPLES)
@given(data=st.data(), shape=models(), seed=st.integers(0, 2**16))
def test_static_pruning_equals_the_reference(tiny_of: Build, data: st.DataObject, shape: Shape, seed: int) -> None:
    rules = static(data.draw(st.integers(1, shape.n_layers - 1)), data.draw(st.floats(0.02, 1.0)))
    turns = data.draw(st.lists(TURNS, max_size=5))
    passes = [(data.draw(st.integers(1, 60)), False), *itertools.chain.from_iterable(turns)]
    assume(drive(tiny_of(shape), rules, passes, seed).margin > NEAR_TIE)


OPTIONS: list[dict[str, Any]] = [
    *({"sink": 3, "window": 4}, {"protect": [(5, 9)]}, {"queries": 4}, {"smooth": 5}),
    *({"queries": 3, "smooth": 3}, {"min_tokens": 38}, {"prune_generated": True}),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("keep", [0.3, (0.5, 0.1, 0.6)], ids=str)
def test_static_pruning_with_the_options_of_selection(tiny_of: Build, options: dict[str, Any], keep: Any) -> None:
    passes = [(30, False), (1, True), (1, True), (8, False), (1, True), (5, False), (1, True)]
    rules = static(3, keep, **options)
    assert drive(tiny_of(Shape(seed=41, n_layers=5)), rules, passes).margin > NEAR_TIE


@pytest.mark.parametrize("rules", [static(2, 0.3), pruning([(1, 0.3, True), (3, 0.2)])], ids=["static", "drop"])
def test_what_is_dropped_is_never_in_play_again(tiny_of: Build, rules: dict[str, Any]) -> None:
    """Each pass leaves ceil(keep n) prompt tokens in total; what other stages drop comes back."""
    tiny, several = tiny_of(Shape(seed=44, n_layers=5)), len(rules["stages"]) > 1
    session = tiny.load().session(rules)
    session.trace = True
    gone: set[int] = set()
    n_prompt = revived = 0
    for number, (count, generated) in enumerate([(40, False), (1, True), (1, True), (20, False), (1, True)]):
        session.forward(tiny.ids(count, number), generated=generated)
        n_prompt += 0 if generated else count
        sets = [set(in_play) for in_play, _ in per_layer(session.last_trace, 5)]
        assert sets[0] == sets[1] == set(range(session.length)) - gone
        assert sets[2] == sets[3]
        gone |= sets[1] - sets[2]
        prompt = set(np.flatnonzero(session.kinds == 0).tolist())
        assert len(prompt - gone) == math.ceil(0.3 * n_prompt)
        assert len(prompt & sets[4]) == math.ceil((0.2 if several else 0.3) * n_prompt)
        revived += session.last_pass[:, 2].sum()
    assert (revived > 0) == several


# ---- surprisal -------------------------------------------------------------------------------------------


@settings(max_examples=EXAMPLES)
@given(data=st.data(), shape=models(), seed=st.integers(0, 2**16))
def test_surprisal_equals_the_reference(tiny_of: Build, data: st.DataObject, shape: Shape, seed: int) -> None:
    tiny = tiny_of(shape)
    session, reference = tiny.load().session(None), Reference(tiny.config, tiny.weights, pruning())
    for number, count in enumerate(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))):
        ids = tiny.ids(count, seed + number)
        got, want = session.surprisal(ids), reference.surprisal(ids)
        assert got.dtype == np.float32
        assert got.shape == (count,)
        assert np.isnan(got).tolist() == np.isnan(want).tolist() == [number == 0] + [False] * (count - 1)
        if count > 1 or number:
            assert error(got[np.isfinite(got)], want[np.isfinite(want)]) <= SURPRISAL
        if data.draw(st.booleans()):
            between = tiny.ids(1, seed + 99)
            assert error(session.forward(between, generated=True), reference.forward(between, True)) <= SURPRISAL


@pytest.mark.skipif(DEVICE != "cpu", reason="minutes, on a GPU or where its kernels run on the CPU")
@pytest.mark.parametrize("vocab", [200_000, 1_000_000], ids=["several rows at a time", "few"])
def test_surprisal_of_more_rows_than_the_head_takes_at_once(tiny_of: Build, vocab: int) -> None:
    tiny = tiny_of(Shape(seed=47, vocab=vocab, n_layers=2, hidden=8, tied=True))
    ids = tiny.ids(180 if vocab < 10**6 else 37)
    whole = tiny.load(2).session(None).surprisal(ids)
    session = tiny.load(2).session(None)
    by_one = [-log_softmax(session.forward([a]).astype(float))[b] for a, b in itertools.pairwise(ids)]
    assert error(whole[1:], np.array(by_one)) <= SURPRISAL


def test_surprisal_refuses(tiny_of: Build) -> None:
    tiny = tiny_of(Shape(seed=48))
    for rules in (pruning([(0, 0.5)]), pruning(decode=[(0, 0.5)]), static(1, 0.5)):
        session = tiny.load().session(rules)
        with pytest.raises(ValueError, match="prunes"):
            session.surprisal([1, 2])
        assert session.length == 0
    with pytest.raises(ValueError, match="token id 97 at index 1"):
        tiny.load().session(None).surprisal([1, 97])
    with pytest.raises(TypeError, match="watch"):
        tiny.load().session(None).surprisal([1], watch=5)


# ---- random token drop -----------------------------------------------------------------------------------


@given(n=st.integers(1, 300), keep=st.floats(0.001, 1.0), seed=st.integers(0, 2**62), turn=st.integers(0, 3))
def test_random_positions(n: int, keep: float, seed: int, turn: int) -> None:
    positions = RandomDrop(keep, seed).positions(n, turn).tolist()
    assert positions == sorted(set(positions))
    assert len(positions) == math.ceil(keep * n)
    assert positions[0] >= 0
    assert positions[-1] == n - 1
    assert RandomDrop(keep, seed).positions(n, turn).tolist() == positions


def test_random_positions_are_uniform_and_depend_on_seed_and_turn() -> None:
    draws = [RandomDrop(0.3, seed).positions(20) for seed in range(2000)]
    share = np.bincount(np.concatenate(draws), minlength=20) / 2000
    assert share[:19] == pytest.approx(np.full(19, 5 / 19), abs=0.05)
    sets = [RandomDrop(0.5, seed).positions(60, turn).tolist() for seed, turn in ((1, 0), (2, 0), (1, 1))]
    assert sets[0] != sets[1] != sets[2] != sets[0]


@pytest.mark.parametrize("method", [RandomDrop(0.3, seed=4), GemFilter(2, 0.3)])
def test_a_prompt_that_was_shortened_is_read_densely(llm: LLM, method: Any) -> None:
    out, shorter = llm.generate(IDS, method, max_new_tokens=5), method.ids(llm, IDS, 0)
    plain = llm.generate(shorter, max_new_tokens=5)
    assert (len(shorter), out.prompt_ids, out.token_ids) == (15, shorter, plain.token_ids)
    assert out.passes.tolist() == plain.passes.tolist()
    assert (out.pruning, out.n_given) == (method, len(IDS))
    assert out.computed == out.reached_top == pytest.approx(0.3)
    assert str(method) in repr(out)


def test_counted_work(llm: LLM) -> None:
    config, n = llm.config, 500
    dense, width = Pruning().flops(config, n), config.n_heads * config.head_dim
    assert RandomDrop(0.3).flops(config, n) == Pruning().flops(config, 150)
    assert RandomDrop(0.3).speedup(config, n) == dense / Pruning().flops(config, 150)
    windowed = replace(config, windows=(9, *config.windows[1:]))  # where the query sees 9 tokens, not all
    for model, seen in (config, n + n), (windowed, 9 + n):
        flops = Pruning({2: 0.4}).flops(model, n) + seen * 2 * width
        assert StaticPruning(2, 0.4).flops(model, n) == flops
    with pytest.raises(ValueError, match="n_prompt"):
        RandomDrop(0.3).flops(config, 0)


# ---- prompt compression ----------------------------------------------------------------------------------


def test_ends_of_sentences() -> None:
    sentences = ["One. ", "Two!? ", '"Three." ', "(Four?) ", "Five… ", "3.5 six"]
    text = "".join(sentences)
    ends = sentence_ends(text)
    assert [text[a:b] for a, b in itertools.pairwise([0, *ends])] == sentences
    chinese = "\u4f60\u597d\u3002\u518d\u89c1\uff01"
    assert sentence_ends(chinese) == [3, 6]


def test_sentences_below_the_percentile_go() -> None:
    nan = math.nan
    for scores, ratio, want in (
        ([1.0, 5.0, 3.0, 4.0, 2.0], 0.0, [1, 1, 1, 1, 1]),
        ([1.0, 5.0, 3.0, 4.0, 2.0], 0.5, [0, 1, 1, 1, 0]),  # the median is kept
        ([1.0, 5.0, 3.0, 4.0, 2.0], 0.6, [0, 1, 0, 1, 0]),  # the percentile is 3.4
        ([1.0, 5.0, 3.0, 4.0, 2.0], 1.0, [0, 1, 0, 0, 0]),
        ([nan, nan], 0.5, [1, 1]),
        ([nan, 5.0, 3.0], 1.0, [1, 1, 0]),
        ([2.0, 2.0, 2.0], 0.5, [1, 1, 1]),
        (range(101), 0.37, [score >= 37 for score in range(101)]),
    ):
        assert kept(np.array(scores, float), ratio).tolist() == want


def fake_llm(information: list[float], pieces: list[str]) -> Any:
    """A language model that gives the tokens `pieces` the self-information `information`."""
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special=True: list(range(len(pieces))) if text else [],
        offsets=lambda ids: [pieces[i] for i in ids],
        bos_token_id=None,
    )
    session = SimpleNamespace(surprisal=lambda ids, progress: np.array(information, np.float32)[ids])
    config = SimpleNamespace(context=1000)
    return SimpleNamespace(tokenizer=tokenizer, session=lambda: session, config=config)


PIECES = ["A", " b", ".", " C", " d", " e", ".", " F", "."]
# of the sentences 3, 3 and 2.5; sorted 0 1 1 1 2 4 5 9; the first token's is unknown, so it is kept
INFORMATION = [math.nan, 2.0, 4.0, 9.0, 1.0, 1.0, 1.0, 5.0, 0.0]


@pytest.mark.parametrize(
    ("information", "pieces", "ratio", "want"),
    [
        (INFORMATION, PIECES, 0.0, "A b. C d e. F."),
        (INFORMATION, PIECES, 0.5, "A b. C d e."),
        # the tokens of a character belong to its sentence: their means are 2 and 3, not 4 and 0.5
        ([2.0, 2.0, 8.0, 1.0, 0.0], ["a.", " ", "", "é", "."], 1.0, "é."),
        # a sentence within a token joins the next one
        ([1.0, 5.0, 3.0], ["a.", " b. c.", " d"], 0.5, "b. c. d"),
        ([1.0, 5.0, 3.0], ["a.", " b. c.", " d"], 0.9, "b. c."),
        ([1.0, 5.0, 3.0], ["a.", " b. c.", " d"], 0.0, "a. b. c. d"),
    ],
)
def test_compression_worked_by_hand(information: list[float], pieces: list[str], ratio: float, want: str) -> None:
    assert PromptCompression(ratio).compress(fake_llm(information, pieces), "".join(pieces)) == want


def test_self_information_is_the_models(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    logits = [llm.session().forward(ids[:k]) for k in range(1, len(ids))]
    want = [-log_softmax(row.astype(float))[token] for row, token in zip(logits, ids[1:], strict=True)]
    got = self_information(llm, ids)
    assert math.isnan(got[0])  # this tokenizer adds no token at the start
    assert got[1:] == pytest.approx(want, rel=1e-4)


def test_a_token_that_begins_makes_the_first_one_known(llm: LLM) -> None:
    tokenizer, ids = llm.tokenizer, IDS
    bos = tokenizer.bos_token_id
    begun = SimpleNamespace(encode=lambda text: [bos], bos_token_id=bos)
    model: Any = SimpleNamespace(tokenizer=begun, session=llm.session, config=llm.config)
    assert self_information(model, ids) == pytest.approx(llm.session().surprisal([bos, *ids])[1:])


def test_texts_longer_than_the_context_are_read_in_windows(folder: Path, tmp_path: Path) -> None:
    small = lazyllm.load(model_folder(tmp_path, Shape(vocab=300, context=40, n_layers=2)), threads=1)
    ids = [(7 * k) % 250 for k in range(95)]
    got = self_information(small, ids)
    assert got.size == 95
    assert np.isfinite(got[1:]).all()
    assert got[:40] == pytest.approx(small.session().surprisal(ids[:40]), nan_ok=True)
    assert got[40:60] == pytest.approx(small.session().surprisal(ids[20:60])[20:])
    assert got[80:] == pytest.approx(small.session().surprisal(ids[60:])[20:])


def test_compressed_prompts_are_answered(llm: LLM) -> None:
    """Prompts are text, a chat, messages, of which those of the user are compressed, and part of a session."""
    method = PromptCompression(0.5)
    short = method.compress(llm, TEXT)
    assert 0 < len(short) < len(TEXT)
    out, plain = llm.generate(TEXT, method, max_new_tokens=4), llm.generate(short, max_new_tokens=4)
    assert (out.token_ids, out.prompt_ids) == (plain.token_ids, plain.prompt_ids)
    assert (out.pruning, out.n_given) == (method, len(llm.tokenizer.encode(TEXT)))
    assert out.computed == pytest.approx(len(out.prompt_ids) / out.n_given)
    system = {"role": "system", "content": TEXT}
    long, brief = ([system, {"role": "user", "content": text}] for text in (TEXT, short))
    pairs: list[Any] = [(TEXT, short), (long, brief)]
    for prompt, shorter in pairs:
        chat = llm.generate(prompt, method, max_new_tokens=2, chat=True)
        assert chat.prompt_ids == llm.generate(shorter, max_new_tokens=2, chat=True).prompt_ids
    assert llm.session(method).ask(TEXT, max_new_tokens=2).prompt_ids == plain.prompt_ids


def test_compression_refuses_what_is_no_text(llm: LLM) -> None:
    method = PromptCompression(0.5)
    assert method.compress(llm, " \n ") == ""
    spaced = "\n The sea.\t\tIt \u3000was  calm. "
    assert PromptCompression(0.0).compress(llm, spaced) == "The sea. It was calm."
    for call in (lambda: llm.generate(IDS, pruning=method), lambda: llm.session(method).forward(IDS)):
        with pytest.raises(TypeError, match="needs text or messages, not token ids"):
            call()


# ---- settings --------------------------------------------------------------------------------------------

FORMS = {
    "dense": Pruning(),
    " dense ": Pruning(),
    "null": Pruning(),
    '{"10": 0.7, "20": {"mass": 0.9}}': Pruning({10: 0.7, 20: Mass(0.9)}),
    '{"7": {"drop": 0.4}, "15": 0.3}': Pruning({7: Drop(0.4), 15: 0.3}),
    "[[10, 0.7]]": Pruning({10: 0.7}),
    "random:keep=0.5": RandomDrop(0.5),
    "random: keep = 5e-1 , seed = 3": RandomDrop(0.5, 3),
    "static:layer=7,keep=0.5": StaticPruning(7, 0.5),
    "fastkv:layer=14,keep=0.2": FastKV(14, 0.2),
    "claa:layer=14,keep=0.2": CLAA(14, 0.2),
    "gemfilter:layer=12,keep=0.1": GemFilter(12, 0.1),
    "snapkv:keep=0.5": SnapKV(0.5),
    "expected:keep=0.5": ExpectedAttention(0.5),
    "compress:ratio=0.5": PromptCompression(0.5),
}


@pytest.mark.parametrize(("text", "method"), FORMS.items())
def test_settings_are_frozen_hashable_and_written_as_text(text: str, method: Any) -> None:
    for again in (parse_method(text), parse_method(method.to_json()), eval(repr(method), vars(lazyllm))):
        assert (again, hash(again)) == (method, hash(method))
    with pytest.raises(AttributeError):
        method.keep = 0.1


def test_bad_fields_and_texts_are_refused() -> None:
    for make, kind, words in (
        (lambda: RandomDrop(0), ValueError, "keep must be above 0 and at most 1, not 0.0"),
        (lambda: RandomDrop("0.5"), TypeError, "keep must be a number, not '0.5'"),
        (lambda: RandomDrop(0.5, -1), ValueError, "seed must be from 0"),
        (lambda: RandomDrop(0.5, 1.0), TypeError, "seed must be a whole number"),
        (lambda: StaticPruning(-1, 0.5), ValueError, "layer must be from 0"),
        (lambda: FastKV(-1, 0.5), ValueError, "layer must be from 0"),
        (lambda: PromptCompression(-0.1), ValueError, "ratio must be from 0 to 1, not -0.1"),
        (lambda: PromptCompression("half"), TypeError, "ratio must be a number"),
        ("sparse", ValueError, "pruning is 'sparse'; it must be a speedup such as 2x, dense, random:keep"),
        ("random", ValueError, "random: missing a required argument: 'keep'"),
        ("random:0.5", ValueError, "has '0.5', where a new name=value is wanted"),
        ("random:keep=", TypeError, "keep must be a number, not ''"),
        ("random:keep=0.5,keep=0.6", ValueError, "has 'keep=0.6', where a new name=value is wanted"),
        ("random:keep=0.5,layers=3", ValueError, "argument 'layers'; it takes keep, seed"),
        ("{", ValueError, "pruning is not JSON"),
        ('{"method": "magic"}', ValueError, "method is 'magic'; it must be one of compress, random, static"),
        ('{"10": 0.7, "10": 0.5}', ValueError, "'10' appears twice"),
        (lambda: RandomDrop.from_fields({"method": "snapkv"}), ValueError, "method is 'snapkv'; it must be 'random'"),
        (lambda: RandomDrop.from_fields([0.5]), TypeError, "random must be a JSON object"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            parse_method(make) if isinstance(make, str) else make()
