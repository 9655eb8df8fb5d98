"""Rounded weights kept in the cache: the same bits as rounding on loading, and never of another file."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from faults import cut, holds, remove
from folders import model_folder
from test_gguf_checkpoint import toy
from toys import write_gguf

import lazyllm
from lazyllm.checkpoints import rounded
from lazyllm.checkpoints.checkpoint import Checkpoint

pytestmark = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="rounding on the CPU")
SHAPE = tiny.Shape(vocab=300, hidden=64, ffn=96, n_layers=3, dtype="BF16")
IDS = list(range(40))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAZYLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / rounded.FOLDER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model", SHAPE)


def logits(path: Path, weights: str, **options: object) -> np.ndarray:
    llm = lazyllm.load(path, device="cpu", threads=2, weights=weights, **options)  # type: ignore[arg-type]
    return np.concatenate([llm.core.session(None).forward(ids) for ids in (IDS, IDS[:1])])


def is_as_on_loading(path: Path, weights: str = "q4") -> None:
    np.testing.assert_array_equal(logits(path, weights, cache_weights=True), logits(path, weights))


@pytest.mark.parametrize("weights", ["q8", "q4"])
def test_the_same_bits(weights: str, folder: Path, cache: Path) -> None:
    is_as_on_loading(folder, weights)
    (made,) = cache.glob("*.safetensors")
    before = made.stat().st_mtime_ns
    is_as_on_loading(folder, weights)
    assert made.stat().st_mtime_ns == before
    options = {"device": "cpu", "weights": weights}
    kept, fresh = (lazyllm.load(folder, cache_weights=cached, **options) for cached in (True, False))
    assert repr(kept) == repr(fresh)
    assert kept.checkpoint.shards == fresh.checkpoint.shards
    assert not list(cache.glob("*.partial"))


def test_rows_by_pairs(tmp_path: Path, cache: Path) -> None:
    """q and k of a Llama's GGUF file are sorted when they are bound, after they were rounded."""
    files, stored = toy(["F16"], biased=True)
    is_as_on_loading(write_gguf(tmp_path / "model.gguf", *files, kind=stored))


@pytest.mark.parametrize("keep_times", [False, True])
def test_another_checkpoint_in_its_place(keep_times: bool, folder: Path, cache: Path, tmp_path: Path) -> None:
    """The other file has the same size and, as after `cp -p`, the same time of change."""
    first = logits(folder, "q4", cache_weights=True)
    other = model_folder(tmp_path / "other", replace(SHAPE, seed=5))
    target = folder / "model.safetensors"
    times = target.stat()
    shutil.copyfile(other / "model.safetensors", target)
    if keep_times:
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not np.array_equal(logits(folder, "q4", cache_weights=True), first)
    is_as_on_loading(folder)


def test_a_file_that_is_replaced_before_it_is_rounded(folder: Path, cache: Path, tmp_path: Path) -> None:
    other = model_folder(tmp_path / "other", replace(SHAPE, seed=5))
    found = Checkpoint(folder)
    (other / "model.safetensors").rename(folder / "model.safetensors")
    (*_, path), _ = rounded.rounded(found, "q4", progress=False)
    of_old = Path(path).read_bytes()
    is_as_on_loading(folder)
    assert Path(path).read_bytes() != of_old


def test_damaged_files_are_made_anew(folder: Path, cache: Path) -> None:
    is_as_on_loading(folder)
    (made,) = cache.glob("*.safetensors")
    whole = made.read_bytes()
    for damage in (cut(-64), holds(b""), remove, holds(b"\2" + b"\0" * 7 + b"{}")):
        damage(made)
        is_as_on_loading(folder)
        assert made.read_bytes() == whole


def test_stopped_while_writing(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            logits(folder, "q4", cache_weights=True)
    assert not list(cache.glob("*.safetensors"))
    is_as_on_loading(folder)


def test_another_version_is_made_anew(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_as_on_loading(folder)
    (made,) = cache.glob("*.safetensors")
    before = made.stat().st_ino
    monkeypatch.setattr(rounded, "VERSION", rounded.VERSION + 1)
    is_as_on_loading(folder)
    assert made.stat().st_ino != before


def test_nothing_to_keep(folder: Path, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='cache_weights keeps rounded weights; give weights="q8" or "q4"'):
        lazyllm.load(folder, cache_weights=True)
    files, stored = toy(["Q8_0"])
    path = write_gguf(tmp_path / "q8.gguf", *files, kind=stored)
    with pytest.raises(ValueError, match=r'weights="q4": tensor .* is stored in Q8_0'):
        lazyllm.load(path, device="cpu", weights="q4", cache_weights=True)
    assert not cache.exists()
