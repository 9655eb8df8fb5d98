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
STAGES = tiny.pruning([(1, 0.5), (3, 0.3)])


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
            with pytest.raises(RuntimeError, match="in use by another thread"):
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
