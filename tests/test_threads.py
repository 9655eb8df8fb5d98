"""Threads and forks: the model is shared, a session is not."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny

from lazyllm import _core

SHAPE = tiny.Shape(seed=8, n_layers=5)
STAGES = tiny.pruning([(0, 0.5)])


@pytest.fixture
def made(tmp_path: Path) -> tiny.Tiny:
    return tiny.build(SHAPE, tmp_path)


def logits_of(model: _core.Model, made: tiny.Tiny) -> np.ndarray:
    return model.session(STAGES).forward(made.ids(200))


def test_threads_share_a_model(made: tiny.Tiny) -> None:
    model = made.load(threads=2)
    want = logits_of(model, made)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: logits_of(model, made), range(40)):
            np.testing.assert_array_equal(got, want)


def test_a_session_refuses_a_second_thread(made: tiny.Tiny) -> None:
    session = made.load().session(None)
    inside, leave = threading.Event(), threading.Event()

    def wait(layers_done: int, n_layers: int) -> None:
        inside.set()
        leave.wait()

    first = threading.Thread(target=session.forward, args=(made.ids(5),), kwargs={"watch": wait})
    first.start()
    try:
        assert inside.wait(10)
        for use in (lambda: session.forward([1]), lambda: session.reserve(10), lambda: session.depths):
            with pytest.raises(RuntimeError, match="in use: a call on it is under way"):
                use()
    finally:
        leave.set()
        first.join()
    assert session.length == 5
    session.forward([1])


def test_a_fork_after_use_works(made: tiny.Tiny) -> None:
    model = made.load(threads=2)
    want = logits_of(model, made)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(logits_of(model, made)))
    child.start()
    assert ours.poll(30), "the forked child gave no answer"
    np.testing.assert_array_equal(ours.recv(), want)
    child.join()
    np.testing.assert_array_equal(logits_of(model, made), want)


def test_a_watch_may_use_the_model(tmp_path: Path) -> None:
    """A pass long enough that its watch is called between the tasks of one op."""
    shape = tiny.Shape(n_layers=12, hidden=256, n_heads=8, n_kv_heads=8, head_dim=32, ffn=1024, context=4096)
    made = tiny.build(shape, tmp_path)
    model = made.load(threads=1)
    want = logits_of(model, made)
    seen = []
    session = model.session(None)
    session.forward(made.ids(2000), watch=lambda done, total: seen.append(logits_of(model, made)))
    assert len(seen) > 1
    for got in seen:
        np.testing.assert_array_equal(got, want)


def test_watches_may_nest(tmp_path: Path) -> None:
    """A watch of one model runs another long enough to be watched too, and then the first again."""
    shape = tiny.Shape(n_layers=4, hidden=256, n_heads=8, n_kv_heads=8, head_dim=32, ffn=1024, context=4096)
    made = tiny.build(shape, tmp_path)
    first, second = made.load(threads=1), made.load(threads=1)
    want = logits_of(first, made)
    seen = []

    def inner(done: int, total: int) -> None:
        seen.append(logits_of(first, made))

    def outer(done: int, total: int) -> None:
        if not seen:
            second.session(None).forward(made.ids(1500), watch=inner)
            seen.append(logits_of(first, made))

    first.session(None).forward(made.ids(2000), watch=outer)
    assert len(seen) > 1
    for got in seen:
        np.testing.assert_array_equal(got, want)


def test_what_a_watch_raises_stops_the_pass(made: tiny.Tiny) -> None:
    model = made.load()
    session = model.session(None)

    def stop(layers_done: int, n_layers: int) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        session.forward(made.ids(50), watch=stop)
    with pytest.raises(RuntimeError, match="an earlier pass of this session did not finish"):
        session.forward([1])
    assert np.isfinite(logits_of(model, made)).all()
