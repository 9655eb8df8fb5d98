"""Policies: rules of scoring by users, against the reference; what a view shows; what is refused."""

import gc
import itertools
import json
import re
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import drive
from folders import IDS
from reference import Reference
from tiny import DEVICE, DTYPES, Build, Shape, Tiny
from tolerances import HALF_LOGITS, NEAR_TIE, SCORES, error
from toys import Paper

import lazyllm
from lazyllm import LLM, Drop, Mass, Policy, Pruning, Scoring
from lazyllm.methods.parsing import as_method
from lazyllm.pruning import DENSE

ARRAYS = ("attention", "queries", "keys", "values", "hidden")
CONVERSATION = [(30, False), (1, True), (1, True), (7, False), (2, True), (1, True), (1, False), (1, True)]


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return lazyllm.load(folder, device=DEVICE, threads=2)


class ThreeLayers(Policy):
    """The rule of `Pruning(layers=3)`."""

    layers = 3

    def observe(self, view: Any) -> Any:
        scores = np.where(view.protected, 0.0, view.attention(1).mean(axis=(0, 1)))
        return np.stack([np.full(scores.shape, view.window or np.inf), scores])

    def score(self, view: Any) -> Any:
        below = [view.aligned(layer) for layer in view.observed if layer > view.layer - self.layers]
        windows, scores = zip(*below, self.observe(view), strict=True)
        return np.max(scores, axis=0, where=np.greater_equal(windows, windows[-1]), initial=0)


class SmallValues(Policy):
    """Scores of both signs, from all arrays but attention."""

    def score(self, view: Any) -> Any:
        spread = np.square(view.queries(3)).mean() + np.abs(view.hidden()).mean()
        return (view.keys() - np.square(view.values())).sum(axis=(0, 2)) * spread


class Thirds(Policy):
    """Positions: those of one remainder by 3, another at each layer."""

    def score(self, view: Any) -> Any:
        return view.positions[view.positions % 3 == view.layer % 3][::-1]


class Calls(Policy):
    """Scores by a function, and notes what it is called with."""

    def __init__(self, stages: Any, rule: Any = None, layers: int = 1, **options: Any) -> None:
        super().__init__(stages, **options)
        self.layers = layers
        self._rule = rule or (lambda view: view.attention(1).mean(axis=(0, 1)))
        self._seen: list[Any] = []

    def observe(self, view: Any) -> Any:
        self._seen.append(("observe", view.layer, view.n_keep, view.is_prompt))
        return view.layer

    def score(self, view: Any) -> Any:
        self._seen.append(("score", view.layer, view.n_keep, view.is_prompt))
        return self._rule(view)


def sets_of(tiny: Tiny, policy: Policy) -> list[list[int]]:
    """The sets in play of a pass over 20 tokens, each once."""
    session = tiny.load().session(policy.core())
    session.trace = True
    session.forward(tiny.ids(20))
    return [run["in_play"].tolist() for run in session.last_trace]


# ---- against the reference ---------------------------------------------------------------------------------

GEMMA = {"post_norms": True, "norm_plus_one": True, "gelu": True}
SHAPES = [
    Shape(seed=1),
    Shape(seed=2, n_layers=6, n_kv_heads=1, windows=(0, 5), qkv_bias=True),
    Shape(seed=3, n_layers=5, n_kv_heads=4, windows=(7,), qk_norm=True, query_scalar=11.0),
    Shape(seed=4, n_layers=6, head_dim=16, dtype=DTYPES[-1], **GEMMA, attention_cap=3.0),
]
OPTIONS: list[dict[str, Any]] = [
    {"sink": 3, "window": 4, "protect": [(11, 14), (60, 70)]},
    {"decode": "frozen"},
    {"decode": {1: 0.2}},
    {"min_tokens": 35},
    {"stages": {0: Drop(0.8), 1: 0.4, 2: 0.2}},
    {"stages": Pruning({0: 0.8, 1: 0.5, 2: 0.3}, prune_generated=True)},
]
CASES = [(shape, {}) for shape in SHAPES]
CASES += zip(itertools.cycle(SHAPES), OPTIONS if DEVICE == "cpu" else [])  # the emulated device is slow
each_case = pytest.mark.parametrize(("shape", "options"), CASES)


@each_case
@pytest.mark.parametrize("rule", [Paper, ThreeLayers, SmallValues, Thirds])
def test_engine_equals_reference(tiny_of: Build, rule: type[Policy], shape: Shape, options: dict[str, Any]) -> None:
    """The reference scores as docs/method.md says where the core has the rule, else by the policy too."""
    policy = rule(**{"stages": {0: 0.8, 1: 0.5, 2: 0.15}, **options})
    own = None if rule in (Paper, ThreeLayers) else policy
    assert drive(tiny_of(shape), policy.core(), CONVERSATION, seed=7, policy=own).margin > NEAR_TIE


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"model {shape.seed}")
def test_a_view_shows_what_the_reference_has(tiny_of: Build, shape: Shape) -> None:
    """Every array of every call, through prefill, revival, follow-ups and decode steps."""
    plain = ("layer", "is_prompt", "n_keep")
    whole = ("positions", "rows", "protected")
    close = {"attention": (3,), "queries": (2,), "keys": (), "values": (), "hidden": ()}  # with arguments
    kept: list[dict[str, Any]] = []

    def note(view: Any) -> None:
        noted = {name: getattr(view, name) for name in plain + whole}
        noted |= {name: getattr(view, name)(*rows) for name, rows in close.items()}
        kept.append(noted | {"observed": dict(view.observed)})

    class Noting(Paper):
        layers = 2

        def observe(self, view: Any) -> Any:
            note(view)
            return view.layer

        def score(self, view: Any) -> Any:
            note(view)
            return super().score(view)

    tiny, policy = tiny_of(shape), Noting({1: 0.6, 2: 0.3}, sink=2)
    session = tiny.load().session(policy.core())
    reference = Reference(tiny.config, tiny.weights, policy.core(), policy)
    revived = 0
    for number, (count, generated) in enumerate(CONVERSATION):
        kept.clear()
        reference.forward(tiny.ids(count, number), generated)
        wanted = kept.copy()
        kept.clear()
        session.forward(tiny.ids(count, number), generated=generated)
        revived += session.last_pass[:, 2].sum()
        assert [noted["layer"] for noted in kept] == [noted["layer"] for noted in wanted] == [0, 1, 1, 2]
        for got, want in zip(kept, wanted, strict=True):
            for name in (*plain, "observed"):
                assert got[name] == want[name], name
            for name in whole:
                assert got[name].tolist() == want[name].tolist(), name
            for name in close:
                assert got[name].dtype == np.float32
                assert got[name].shape == want[name].shape, name
                assert error(got[name], want[name]) <= 3 * SCORES[shape.dtype], name
    assert reference.margin > NEAR_TIE
    assert revived > 0


@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU computes in float32 always")
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_activations_of_16_bits_are_shown_in_float32(tiny_of: Build, dtype: str) -> None:
    shown: list[dict[str, np.ndarray]] = []

    def rule(view: Any) -> Any:
        shown.append({name: getattr(view, name)() for name in ARRAYS})
        return view.positions[:5]

    tiny, policy = tiny_of(Shape(dtype=dtype)), Calls({0: 0.5, 2: 0.1}, rule)
    tiny.load().session(policy.core()).forward(tiny.ids(30))
    Reference(tiny.config, tiny.weights, policy.core(), policy).forward(tiny.ids(30))
    for got, want in zip(shown[:2], shown[2:], strict=True):
        for name, array in got.items():
            assert array.dtype == np.float32
            assert array.shape == want[name].shape
            assert error(array, want[name]) <= HALF_LOGITS[dtype], name


# ---- when it is called -------------------------------------------------------------------------------------


def test_calls_of_a_conversation(tiny_of: Build) -> None:
    """`observe` below a stage that will drop tokens, `score` at it; neither in a pass that drops none, nor
    at a stage that keeps all."""
    tiny, policy = tiny_of(Shape(n_layers=6)), Calls({0: 1.0, 2: 0.5, 3: 0.25}, layers=3, min_tokens=12)
    session = tiny.load().session(policy.core())
    session.trace = True  # which changes nothing
    session.forward(tiny.ids(10))  # dense
    assert policy._seen == []
    session.forward(tiny.ids(10))
    first = [("observe", 0, None, True), ("observe", 1, None, True), ("observe", 2, None, True)]
    assert policy._seen == [*first, ("score", 2, 10, True), ("score", 3, 5, True)]
    policy._seen.clear()
    session.forward(tiny.ids(1), generated=True)
    assert [is_prompt for *_, is_prompt in policy._seen] == [False] * 5


def test_positions_keep_what_is_always_kept(tiny_of: Build) -> None:
    """No position at all, all of them, and protected ones among those chosen."""
    for chosen, want in ([], [0, 1, 19]), (range(20), range(20)), ([0, 5, 5, 19], [0, 1, 5, 19]):
        policy = Calls({1: 0.5}, lambda view, chosen=chosen: np.array(chosen, np.int64), sink=2)
        assert sets_of(tiny_of(Shape()), policy)[-1] == list(want)


def test_stages_may_return_positions_and_scores_in_turn(tiny_of: Build) -> None:
    """Three free tokens stay after layer 0; of them as many as the keep says after layer 1; one after 2."""
    answers = {0: lambda view: view.positions[3:6], 1: lambda view: -1.0 * view.positions}
    answers[2] = lambda view: view.positions[1:2]
    policy = Calls({0: 0.5, 1: 0.15, 2: 0.1}, lambda view: answers[view.layer](view))
    assert sets_of(tiny_of(Shape()), policy) == [list(range(20)), [3, 4, 5, 19], [3, 4, 19], [4, 19]]


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "kind", "message"),
    [
        (lambda view: np.zeros(3), ValueError, "returned 3 scores"),
        (lambda view: view.attention(1).mean(axis=0), TypeError, r"shape \(1, 20\)"),
        (lambda view: np.where(view.positions == 7, np.nan, 0.0), ValueError, "position 7 the score nan"),
        (lambda view: np.full(20, 1e300), ValueError, "position 0 the score 1e[+]300"),
        (lambda view: view.protected, TypeError, "returned ndarray of type bool"),
        (lambda view: [[1.0], [1.0, 2.0]], TypeError, "returned no array"),
        (lambda view: np.array([3, 20]), ValueError, "keeps position 20, which is not in play"),
    ],
)
def test_what_are_no_scores(tiny_of: Build, rule: Any, kind: type[Exception], message: str) -> None:
    tiny = tiny_of(Shape())
    session = tiny.load().session(Calls({1: 0.5}, rule).core())
    words = f"^Calls.score after layer 1 .*{message}.*20 tokens in play, or an integer array of positions"
    with pytest.raises(kind, match=words):
        session.forward(tiny.ids(20))
    assert session.length == 0


@pytest.mark.parametrize("where", ["score", "observe"])
@pytest.mark.parametrize("raised", [ZeroDivisionError("mine"), KeyboardInterrupt("mine")], ids=repr)
def test_an_exception_reaches_the_caller_unchanged(
    tiny_of: Build, raised: BaseException, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(view: Any) -> Any:
        raise raised

    tiny, policy = tiny_of(Shape()), Calls({1: 0.5}, layers=2)
    model = tiny.load()
    before = model.session(policy.core()).forward(tiny.ids(20))
    session = model.session(policy.core())
    with monkeypatch.context() as patch:
        patch.setattr(policy, where, fail)
        with pytest.raises(type(raised)) as caught:
            session.forward(tiny.ids(20))
    assert caught.value is raised
    for after in (session, model.session(policy.core())):
        assert after.forward(tiny.ids(20)).tolist() == before.tolist()


def test_a_view_ends_with_its_call(tiny_of: Build) -> None:
    """Its arrays stay as they were, even after the session is gone, and cannot be written."""
    kept: list[tuple[Any, np.ndarray, list[Any]]] = []
    properties = ("positions", "rows", "protected")

    def rule(view: Any) -> Any:
        arrays = [getattr(view, name)() for name in ARRAYS] + [getattr(view, name) for name in properties]
        kept.extend((view, array, array.tolist()) for array in arrays)
        assert repr(view).startswith(f"<View of layer {view.layer}: ")
        return np.zeros(view.positions.size)

    tiny = tiny_of(Shape())
    session = tiny.load().session(Calls({1: 0.5, 2: 0.4}, rule).core())
    session.forward(tiny.ids(20))
    session.forward(tiny.ids(300))  # its buffers grow
    del session
    gc.collect()
    assert len(kept) == 32
    for view, array, values in kept:
        assert array.tolist() == values
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        for name in (*ARRAYS, *properties):
            with pytest.raises(RuntimeError, match=r"the view of layer \d was used after its call"):
                _ = getattr(view, name)() if name in ARRAYS else getattr(view, name)


def test_the_core_refuses_what_is_no_part_of_a_view(tiny_of: Build) -> None:
    refused = {
        "^21 entries of a view from 0 on": ("keys", 0, 21),
        "^2 entries of a view from -1 on": ("rows", -1, 2),
        "^2 entries of a view from 19 on": ("hidden", 19, 2),
        "^there is no part nothing": ("nothing", 0, 1),
        "^n is -1": ("keys", 0, -1),
    }
    called: list[str] = []
    session: Any = None

    def rule(view: Any) -> Any:
        for words, part in refused.items():
            with pytest.raises(ValueError, match=words):
                session.view(*part)
            called.append(words)
        with pytest.raises(RuntimeError, match="in use"):  # nor may it run its own session
            session.forward([1])
        return np.zeros(20)

    tiny = tiny_of(Shape())
    session = tiny.load().session(Calls({1: 0.5}, rule).core())
    session.forward(tiny.ids(20))
    assert called == [*refused]
    with pytest.raises(RuntimeError, match="only while the session's policy runs"):
        session.view("keys", 0, 1)


@pytest.mark.parametrize(
    ("scores", "n_free", "kept"),
    [
        *((np.zeros(20, np.float32), n_free, kept) for n_free, kept in ((0, 1), (3, 4), (2**31 - 1, 20))),
        (np.zeros(3, np.float32), -1, "3 scores for 20 tokens"),
        (np.zeros(20, np.float32), -2, "the policy keeps -2 tokens"),
    ],
)
def test_the_core_keeps_as_many_as_a_policy_says(
    tiny_of: Build, scores: np.ndarray, n_free: int, kept: int | str
) -> None:
    """At most all; other answers are refused."""
    rules = {**Paper({1: 0.5}).core(), "policy": lambda *_: (scores, n_free)}
    session = tiny_of(Shape()).load().session(rules)
    if isinstance(kept, str):
        with pytest.raises(ValueError, match=kept):
            session.forward(list(range(20)))
    else:
        session.forward(list(range(20)))
        assert session.last_pass[2][0] == kept


def test_what_cannot_be_aligned(tiny_of: Build) -> None:
    for layer, message in (
        (2, r"layer 2 was not observed in this pass, only \[0, 1\]"),
        (0, r"observe gave \(\) after layer 0; expected \(…, 20\)"),
    ):
        policy = Calls({2: 0.5}, lambda view, layer=layer: view.aligned(layer), layers=3)
        with pytest.raises(ValueError, match=message):
            sets_of(tiny_of(Shape()), policy)


# ---- sessions and threads ----------------------------------------------------------------------------------


def test_threads_share_a_policy(tiny_of: Build) -> None:
    tiny, policy = tiny_of(Shape(n_layers=6)), ThreeLayers({2: 0.5, 3: 0.2})
    model = tiny.load(threads=2)

    def run(seed: int) -> list[list[float]]:
        session = model.session(policy.core())
        return [session.forward(tiny.ids(40, seed)).tolist(), session.forward([3], generated=True).tolist()]

    alone = [run(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(8))) == alone


def test_a_policy_may_run_other_sessions_of_its_model(tiny_of: Build) -> None:
    """In its own thread, and in one that it waits for, which needs the GIL and the model."""
    tiny = tiny_of(Shape())
    model = tiny.load(threads=2)

    def run() -> list[float]:
        logits: list[float] = model.session(Paper({1: 0.5}).core()).forward(tiny.ids(40)).tolist()
        return logits

    alone, inner = run(), list[Any]()

    def rule(view: Any) -> Any:
        scores = view.attention().mean(axis=(0, 1))
        with ThreadPoolExecutor(1) as pool:
            inner.extend([run(), pool.submit(run).result(timeout=60)])
        assert scores.tolist() == view.attention().mean(axis=(0, 1)).tolist()
        return scores

    assert model.session(Calls({1: 0.5}, rule).core()).forward(tiny.ids(40)).tolist() == alone
    assert inner == [alone, alone]


def test_a_policy_that_holds_its_session_is_collected(llm: LLM) -> None:
    policy = Calls({1: 0.5})
    session = llm.session(policy)
    policy._session = session  # type: ignore[attr-defined]
    session.forward(IDS)
    gone = weakref.ref(policy)
    del policy, session
    gc.collect()
    assert gone() is None


# ---- the setting -------------------------------------------------------------------------------------------


class Weighted(Paper):
    def __init__(self, stages: Any, weight: Any = 1.0, **options: Any) -> None:
        super().__init__(stages, **options)
        self.weight = weight


class Unready(Paper):
    def __init__(self) -> None:
        pass


def test_equality_hash_and_forms() -> None:
    policy, same = Weighted([(9, 0.3), (15, 0.1)], 0.5, sink=4), Weighted({15: 0.1, 9: 0.3}, 0.5, sink=4)
    assert policy == same
    assert hash(policy) == hash(same)
    others = [
        Weighted({9: 0.3, 15: 0.1}, 0.25, sink=4),
        Weighted({9: 0.3, 15: 0.1}, 0.5),
        Paper({9: 0.3, 15: 0.1}, sink=4),
        Pruning({9: 0.3, 15: 0.1}, sink=4),
    ]
    assert policy not in others
    assert len({other.to_json() for other in (policy, *others)}) == 5
    assert repr(policy) == "Weighted({9: 0.3, 15: 0.1}, sink=4, weight=0.5)"
    assert str(Paper({9: 0.3}, decode="frozen")) == "Paper({9: 0.3}, decode='frozen')"
    arrays = [Weighted({9: 0.3}, np.full(5000, value, np.float32)) for value in (0, 1, 1)]
    assert arrays[0] != arrays[1] == arrays[2]
    assert hash(arrays[1]) == hash(arrays[2])
    assert repr(arrays[0]) != repr(arrays[1]) == repr(arrays[2])
    assert "\n" not in repr(arrays[0])


def test_json_names_the_class_and_its_source() -> None:
    """It tells settings apart, and none is made of it."""
    weight = {"heads": [np.float32(0.5), 2], 3: (None, np.arange(2))}
    text, paper = Weighted({1: 0.5}, weight).to_json(), json.loads(Paper({1: 0.5}).to_json())
    table = json.loads(text)
    assert table["policy"].endswith("test_policy.Weighted")
    assert len(table["source sha256"]) == 64
    assert table["source sha256"] != paper["source sha256"]
    assert table["fields"]["weight"]["heads"] == [0.5, 2]
    assert table["fields"]["weight"]["3"][1].startswith("<int64 (2,) sha256 ")
    assert (table["schedule"]["stages"], table["layers"]) == ({"1": 0.5}, 1)
    names: dict[str, Any] = {}
    exec("class Mine(Policy):\n    def score(self, view): return view.positions", {"Policy": Policy}, names)
    assert json.loads(names["Mine"]({1: 0.5}).to_json())["source sha256"] is None
    for value in (text, table):
        with pytest.raises(ValueError, match=r"the policy .*Weighted is code; give an instance"):
            as_method(value)


def test_a_policy_takes_the_stages_of_a_pruning(llm: LLM) -> None:
    schedule = Pruning.for_speedup(1.5, llm, 200)
    policy = Paper(schedule)
    assert schedule.sink
    assert policy.schedule == replace(schedule, scoring=Scoring.paper())
    assert policy == Paper(schedule.stages, sink=schedule.sink, decode=schedule.decode)
    assert Paper(schedule, sink=0, decode="frozen") == Paper(schedule.stages, decode="frozen")


BY_MASS = {1: Mass(0.9)}


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Policy({1: 0.5}), TypeError, "abstract"),  # type: ignore[abstract]
        (lambda: Paper({1: 1.5}), ValueError, "keep of the stage at layer 1"),
        (lambda: Paper({1: 0.5}, queries=2), TypeError, "queries"),  # type: ignore[call-arg]
        (lambda: Paper({5: 0.5}), ValueError, "layer 5 is out of reach"),
        (lambda: Paper(BY_MASS), ValueError, "takes no stage by mass"),
        (lambda: Paper({1: 0.5}, decode=BY_MASS), ValueError, "takes no stage by mass"),
        (lambda: Calls({1: 0.5}, layers=0), ValueError, "Calls.layers must be from 1"),
        (lambda: Weighted({1: 0.5}, print), TypeError, "Weighted.weight is a builtin_function_or_method"),
        (Unready, TypeError, "Unready.__init__ must call super().__init__(stages)"),
        (lambda: Paper, TypeError, "pruning must be"),
    ],
)
def test_settings_that_are_refused(llm: LLM, make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        llm.session(make())


def test_counted_work_has_no_scores(llm: LLM) -> None:
    policy, config = Paper({1: 0.6, 3: 0.3}, sink=4), llm.config
    scores = (50 + 30) * 2 * config.n_heads * config.head_dim
    assert policy.flops(config, 50) == Pruning({1: 0.6, 3: 0.3}, sink=4).flops(config, 50) - scores
    assert policy.speedup(config, 50) == DENSE.flops(config, 50) / policy.flops(config, 50)
    session = llm.session(policy)
    session.forward(IDS)
    assert policy.prefill_flops(config, 50, session.last_pass) == policy.flops(config, 50)


def test_answers_are_those_of_the_same_rule(llm: LLM) -> None:
    """Prefill and decode steps, by `generate`, `stream` and a conversation, beside the core's own rule."""
    stages = {1: 0.6, 3: 0.3}
    want, got = (llm.generate(IDS, kind(stages), max_new_tokens=8, trace=True) for kind in (Pruning, Paper))
    assert got.token_ids == want.token_ids
    assert got.passes.tolist() == want.passes.tolist()
    for mine, theirs in zip(got.trace.stages, want.trace.stages, strict=True):
        assert mine.kept.tolist() == theirs.kept.tolist()
        assert error(mine.scores, theirs.scores) <= 1e-5
    assert llm.stream(IDS, Paper(stages), max_new_tokens=8).finished().token_ids == want.token_ids
    talks = [llm.session(kind(stages)) for kind in (Pruning, Paper)]
    for text in ("Hello", "And you?"):
        answers = [session.ask(text, chat=True, max_new_tokens=4) for session in talks]
        assert answers[0].token_ids == answers[1].token_ids


def test_time_in_the_policy_is_shown_apart(llm: LLM) -> None:
    spent: list[float] = []

    def rule(view: Any) -> Any:
        begins = time.perf_counter()
        scores = view.attention(8).mean(axis=(0, 1))
        spent.append(time.perf_counter() - begins)
        return scores

    out = llm.generate(IDS, Calls({1: 0.5}, rule), max_new_tokens=3)
    assert 0 < sum(spent) <= out.policy_seconds <= out.seconds
    assert "s in the policy" in out.summary
    for setting in (None, Calls({1: 0.5}, rule, min_tokens=200)):
        out = llm.generate(IDS, setting, max_new_tokens=3)
        assert out.policy_seconds == 0
        assert "policy" not in out.summary
