"""Opening a model: other threads run meanwhile, and a signal stops it."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import Alarm

from lazyllm import CheckpointError, _core

WRITER = "import os, sys, time; time.sleep(5); os.open(sys.argv[1], os.O_WRONLY | os.O_NONBLOCK)"


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[str]:
    """A shard whose opening waits until somebody writes to it; after five seconds another process does."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    yield str(path)
    writer.kill()
    writer.wait()


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    return tiny.build(tiny.Shape(), tmp_path_factory.mktemp("model"))


def open_in_thread(errors: list[str], *given: Any, **options: Any) -> threading.Thread:
    """Begins to open a model on another thread; what is wrong with it goes to `errors`."""

    def run() -> None:
        try:
            _core.Model(*given, **options)
        except CheckpointError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_no_file_stays_open(made: tiny.Tiny, tmp_path: Path) -> None:
    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    empty = tmp_path / "empty"
    empty.touch()
    before = open_files()
    _core.Model(made.config, [str(made.path)], made.tensors)
    assert open_files() == before
    for shard in (empty, tmp_path, tmp_path / "missing"):
        with pytest.raises((CheckpointError, OSError)):
            _core.Model(made.config, [str(made.path), str(shard)], made.tensors)
        assert open_files() == before


def test_other_threads_run_while_a_model_opens(made: tiny.Tiny, pipe: str) -> None:
    """The model waits for a writer, which this thread becomes: possible only if the opening lets it run."""
    errors: list[str] = []
    begun = time.monotonic()
    thread = open_in_thread(errors, made.config, [pipe], made.tensors)
    writer = os.open(pipe, os.O_RDWR)  # waits for nobody
    thread.join()
    os.close(writer)
    assert errors == [f"{pipe}: the file is empty"]
    assert time.monotonic() - begun < 4


def test_arguments_may_change_while_a_model_opens(made: tiny.Tiny, pipe: str) -> None:
    """The lists are emptied while the model waits: it works on copies."""
    config, tensors = dict(made.config), list(made.tensors)
    shards, libraries = ["".join([pipe])], ["".join(["a", "b"])]
    errors: list[str] = []
    thread = open_in_thread(errors, config, shards, tensors, libraries=libraries)
    time.sleep(0.2)
    for given in (config, shards, tensors, libraries):
        given.clear()  # type: ignore[attr-defined]
    writer = os.open(pipe, os.O_RDWR)  # waits for nobody
    thread.join()
    os.close(writer)
    assert errors == [f"{pipe}: the file is empty"]


def test_a_signal_ends_the_wait_for_a_file(made: tiny.Tiny, pipe: str, alarm: Alarm) -> None:
    def stop() -> None:
        raise LookupError("a signal came")

    alarm(stop, 0.2)
    with pytest.raises(LookupError, match="a signal came") as caught:
        _core.Model(made.config, [pipe], made.tensors)
    assert caught.value.__context__ is None  # not raised while handling an error of the core


def test_signals_are_seen_while_weights_are_rounded(tmp_path: Path, alarm: Alarm) -> None:
    """Handlers run while the model opens; without that, they would run once before and once after."""
    layers = 60  # all with the weights of one
    made = tiny.build(tiny.Shape(n_layers=1, hidden=512, ffn=1024), tmp_path)
    tensors = [entry for entry in made.tensors if ".layers." not in entry[0]]
    for name, *rest in made.tensors:
        if ".layers.0." in name:
            tensors += [(name.replace(".0.", f".{layer}."), *rest) for layer in range(layers)]
    zeros = [0] * layers
    config = made.config | {"n_layers": layers, "windows": zeros, "layer_rope": zeros, "expert_layers": zeros}
    calls = []
    alarm(lambda: calls.append(1), 0.001, 0.001)
    _core.Model(config, [str(made.path)], tensors, weights="q8")
    assert len(calls) > 2

    def stop() -> None:
        raise LookupError("a signal came")

    alarm(stop, 0.01)
    with pytest.raises(LookupError, match="a signal came"):
        _core.Model(config, [str(made.path)], tensors, weights="q8")
