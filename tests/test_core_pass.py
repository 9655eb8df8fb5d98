"""One pass of the core: long positions, a short context, a pass that was stopped within an op."""

import time
from pathlib import Path

import numpy as np
import pytest
import tiny
from conftest import Alarm
from reference import Reference
from tolerances import LOGITS, error

POSITIONS = 250_000


def test_rope_angles_are_rounded_to_f32(tmp_path: Path) -> None:
    """At position 250,000 an angle in f64 differs by up to 0.008 from one in f32."""
    checkpoint = tiny.build(tiny.Shape(seed=5, context=POSITIONS), tmp_path)
    ids, first, last = np.array(checkpoint.ids(POSITIONS), np.int32), 9, POSITIONS - 5
    model = checkpoint.load()
    begun, session = model.session(None), model.session(None)
    begun.forward(ids[:first])
    gone = np.arange(last, dtype=np.int32) >= first  # as if a stage had dropped all between for good
    session.set_tokens(ids[:last], np.zeros(last, np.uint8), np.full(last, checkpoint.shape.n_layers, np.int32), gone)
    for layer in range(checkpoint.shape.n_layers):
        for part in ("keys", "values"):
            session.set_state(part, layer, begun.state(part, layer))
    reference = Reference(checkpoint.config, checkpoint.weights, tiny.pruning())
    reference.gone = set(range(first, last))
    assert error(session.forward(ids[last:]), reference.forward(ids.tolist())) <= LOGITS["F32"]


def test_a_watch_is_called_every_20_ms_and_at_the_end(tmp_path: Path) -> None:
    """Calls need the GIL, which may cost more than a layer of a small model."""
    checkpoint = tiny.build(tiny.Shape(n_layers=40), tmp_path)
    calls: list[int] = []
    start = time.monotonic()
    checkpoint.load().session(None).forward(checkpoint.ids(3), watch=lambda done, of: calls.append(done))
    assert calls[-1] == 40
    assert len(calls) <= 1 + (time.monotonic() - start) / 0.02


@pytest.mark.parametrize("threads", [1, 2])
def test_a_model_computes_on_after_a_pass_was_stopped_within_an_op(tmp_path: Path, threads: int, alarm: Alarm) -> None:
    """The only layer takes long enough that the signal falls into it, and its threads leave tasks out."""
    heads = {"n_heads": 16, "n_kv_heads": 16, "head_dim": 32}
    shape = tiny.Shape(n_layers=1, hidden=512, **heads, ffn=2048, context=16_384)
    checkpoint = tiny.build(shape, tmp_path)
    model = checkpoint.load(threads=threads)
    want = model.session(None).forward(checkpoint.ids(400))

    def stop() -> None:
        raise LookupError("enough")

    stopped = model.session(None)
    alarm(stop, 0.1)
    with pytest.raises(LookupError, match="enough"):
        stopped.forward(checkpoint.ids(16_384))
    np.testing.assert_array_equal(stopped.forward(checkpoint.ids(400)), want)
    np.testing.assert_array_equal(model.session(None).forward(checkpoint.ids(400)), want)
