"""Prefill of 16,384 tokens with layers as wide as the demonstration model's: memory grows linearly with the
prompt, and the progress callback is called after every layer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import SANITIZED

TOKENS = 16384
SHAPE = tiny.Shape(
    n_layers=2,  # the last layer computes attention for one token only
    hidden=576,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    ffn=1536,
    context=TOKENS,
    dtype="BF16",
)
SCRIPT = """
import json, sys
import numpy as np
from lazyllm import _core

given = json.load(sys.stdin)
config = {**given["config"], "inv_freq": np.asarray(given["config"]["inv_freq"], np.float32)}
tensors = [(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in given["tensors"]]
model = _core.Model(config, [given["path"]], tensors)
def resident(which):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(which))

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # resets the peak (VmHWM)
before, seen = resident("VmRSS"), []
session = model.session(None)
session.forward(np.arange(given["tokens"]) % 97, watch=lambda done, of: seen.append((done, of)))
estimate = session.bytes_for(given["tokens"])
print(json.dumps({"grown": resident("VmHWM") - before, "seen": seen, "estimate": estimate}))
"""


def run(model: tiny.Tiny, tokens: int) -> dict[str, Any]:
    config = {**model.config, "inv_freq": [float(f) for f in model.config["inv_freq"]]}
    given = {"config": config, "path": str(model.path), "tensors": model.tensors, "tokens": tokens}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


pytestmark = pytest.mark.skipif(SANITIZED, reason="minutes long, and a sanitizer's shadow memory is resident")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    folder: Path = tmp_path_factory.mktemp("long")
    return tiny.build(SHAPE, folder)


@pytest.fixture(scope="module")
def whole(model: tiny.Tiny) -> dict[str, Any]:
    return run(model, TOKENS)


def test_memory_grows_in_line_with_the_prompt(model: tiny.Tiny, whole: dict[str, Any]) -> None:
    half = run(model, TOKENS // 2)
    assert half["grown"] < whole["grown"] < 2.1 * half["grown"]


def test_the_estimate_is_an_upper_bound(whole: dict[str, Any]) -> None:
    assert 0.6 * whole["estimate"] < whole["grown"] < whole["estimate"]


def test_the_watch_sees_the_layers_end(whole: dict[str, Any]) -> None:
    assert whole["seen"] == [[1, SHAPE.n_layers], [2, SHAPE.n_layers]]
