"""Memory that is never written takes no room: the K,V slots of tokens that were pruned."""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path

import pytest
import tiny
from children import python

TOKENS = 8192
SHAPE = tiny.Shape(
    n_layers=24, hidden=64, n_heads=4, n_kv_heads=4, head_dim=64, ffn=64, context=2 * TOKENS, dtype="BF16"
)
KV_OF_A_LAYER = 2 * SHAPE.n_kv_heads * TOKENS * SHAPE.head_dim * 4
SCRIPT = """
import pickle, sys
from lazyllm import _core

config, path, tensors, ids, pruning = pickle.load(sys.stdin.buffer)
model = _core.Model(config, [path], tensors, threads=2)

def resident(which):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(which))

before = resident("VmRSS")
session = model.session(pruning)
session.reserve(len(ids))
session.forward(ids)
read = resident("VmRSS") - before
session.forward([1], generated=True)  # which makes the buffers grow
print(read, resident("VmRSS") - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or tiny.DEVICE != "cpu", reason="reads /proc/self/status")
def test_pruned_tokens_take_no_room_in_the_cache(tmp_path: Path, sanitized: bool) -> None:
    """With 1 % of the tokens kept after the first layer, less than half of all K,V slots become resident.

    So it remains when one more token makes the buffers grow.
    """
    if sanitized:
        pytest.skip("a sanitizer's shadow memory counts as resident")
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not huge.exists() or "[never]" in huge.read_text():
        warnings.warn("huge pages are off here, so that this test cannot fail", stacklevel=1)
    made = tiny.build(SHAPE, tmp_path)
    pruning = tiny.pruning([(0, 0.01)])
    given = pickle.dumps((made.config, str(made.path), made.tensors, made.ids(TOKENS), pruning))
    assert max(map(int, python(SCRIPT, given=given).split())) < SHAPE.n_layers * KV_OF_A_LAYER / 2
