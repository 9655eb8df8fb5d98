"""Opening a model: other threads run meanwhile, and a signal stops it."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    return tiny.build(tiny.Shape(), tmp_path_factory.mktemp("model"))


def test_no_file_stays_open(checkpoint: tiny.Tiny, tmp_path: Path) -> None:
    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    empty = tmp_path / "empty"
    empty.touch()
    before = open_files()
    _core.Model(checkpoint.config, [str(checkpoint.path)], checkpoint.tensors)
    assert open_files() == before
    for shard in (empty, tmp_path, tmp_path / "missing"):
        with pytest.raises((CheckpointError, OSError)):
            _core.Model(checkpoint.config, [str(checkpoint.path), str(shard)], checkpoint.tensors)
        assert open_files() == before


def test_parts_of_words_are_bytes_for_each_token(checkpoint: tiny.Tiny) -> None:
    model = checkpoint.load()
    with pytest.raises(ValueError, match="there are 2 parts of words; the vocabulary has 97 tokens"):
        model.know_words(b"ab")
    with pytest.raises(TypeError):
        model.know_words("a" * 97)  # type: ignore[arg-type]


def test_other_threads_run_while_a_model_opens_and_may_change_its_arguments(checkpoint: tiny.Tiny, pipe: str) -> None:
    """The model waits for a writer, which this thread becomes: possible only if the opening lets it run."""
    config, tensors = dict(checkpoint.config), list(checkpoint.tensors)
    shards, libraries = ["".join([pipe])], ["".join(["a", "b"])]
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(_core.Model, config, shards, tensors, libraries=libraries)
        time.sleep(0.2)
        for argument in (config, shards, tensors, libraries):
            argument.clear()  # type: ignore[attr-defined]
        writer = os.open(pipe, os.O_RDWR)  # waits for nobody
        assert str(opened.exception()) == f"{pipe}: the file is empty"
        os.close(writer)
    assert time.monotonic() - begun < 4


def stop() -> None:
    raise LookupError("a signal came")


def test_a_signal_ends_the_wait_for_a_file(checkpoint: tiny.Tiny, pipe: str, alarm: Alarm) -> None:
    alarm(stop, 0.2)
    with pytest.raises(LookupError, match="a signal came") as caught:
        _core.Model(checkpoint.config, [pipe], checkpoint.tensors)
    assert caught.value.__context__ is None  # not raised while handling an error of the core


def test_signals_are_seen_while_weights_are_rounded(tmp_path: Path, alarm: Alarm) -> None:
    """Handlers run while the model opens; without that, they would run once before and once after."""
    layers = 60  # all with the weights of one
    checkpoint = tiny.build(tiny.Shape(n_layers=1, hidden=512, ffn=1024), tmp_path)
    tensors = [entry for entry in checkpoint.tensors if ".layers." not in entry[0]]
    for name, *rest in checkpoint.tensors:
        if ".layers.0." in name:
            tensors += [(name.replace(".0.", f".{layer}."), *rest) for layer in range(layers)]
    zeros = [0] * layers
    config = checkpoint.config | {"n_layers": layers, "windows": zeros, "layer_rope": zeros, "expert_layers": zeros}
    calls = []
    alarm(lambda: calls.append(1), 0.001, 0.001)
    _core.Model(config, [str(checkpoint.path)], tensors, weights="q8")
    assert len(calls) > 2
    alarm(stop, 0.01)
    with pytest.raises(LookupError, match="a signal came"):
        _core.Model(config, [str(checkpoint.path)], tensors, weights="q8")
