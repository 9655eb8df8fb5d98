"""Compares the engine with recorded results of transformers, for a tiny checkpoint of every family."""

from pathlib import Path

import numpy as np
import pytest
from comparison import compare_pass
from families import DEMO_EVERY, FAMILIES, RECORDED, Expected, greedy_tokens, open_model
from reference import Reference
from tiny import fewer_if_sanitized, pruning
from tolerances import LOGITS, NEAR_TIE, error
from toys import stored_values

from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.machine.cores import cores


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest) -> Path:
    return RECORDED / "families" / str(request.param)


def test_logits_and_greedy_tokens(folder: Path) -> None:
    """After each prefix of the prompt, run at once and in parts, and with a schedule that keeps all."""
    family, expected = FAMILIES[folder.name], Expected.load(folder / "expected.npz")
    model, checkpoint = open_model(folder), Checkpoint(folder)
    assert len(checkpoint.shards) == family.shards
    assert {tensor.dtype for tensor in checkpoint.tensors} == {family.dtype}
    parts, done, short = model.session(None), 0, checkpoint.config.short_context
    for count, logits in zip(expected.prefixes, expected.logits, strict=True):
        if done <= short < count:  # keys of a shorter context would stay as they are: see test_oracle.py
            parts, done = model.session(None), 0
        for got in (
            model.session(None).forward(expected.prompt[:count]),
            model.session(pruning([(0, 1.0)])).forward(expected.prompt[:count]),
            parts.forward(expected.prompt[done:count]),
        ):
            assert error(got, logits) < LOGITS[family.dtype]
        done = count
    assert greedy_tokens(model, expected.prompt, len(expected.greedy)) == expected.greedy


def test_pruned_passes_equal_the_reference(folder: Path) -> None:
    """A prompt, decode steps and a follow-up, with revivals, beyond windows and longrope's switch."""
    config, dtype = Checkpoint(folder).config, FAMILIES[folder.name].dtype
    stages = [(0, 0.6), (1, 0.3)][: config.n_layers - 1]
    rules = pruning(stages, sink=2)
    reference = Reference(config.core(), stored_values(folder), rules)
    session = open_model(folder).session(rules)
    session.trace = True
    for count, generated in ((14, False), (1, True), (1, True), (25, False), (1, True), (1, True)):
        ids = np.random.default_rng(count).integers(0, config.vocab, count).tolist()
        want = reference.forward(ids, generated)
        assert reference.margin > NEAR_TIE
        compare_pass(session, reference, session.forward(ids, generated=generated), want, dtype)
    assert reference.computed < 1


def test_the_demonstration_model(demo_model: Path) -> None:
    expected, model = Expected.load(RECORDED / "smollm2_logits.npz"), open_model(demo_model, threads=cores())
    greedy = expected.greedy[: fewer_if_sanitized(len(expected.greedy))]
    for count, logits in zip(expected.prefixes, expected.logits, strict=True):
        got = model.session(None).forward(expected.prompt[:count])
        assert error(got[::DEMO_EVERY], logits) < LOGITS["BF16"]
    assert greedy_tokens(model, expected.prompt, len(greedy)) == greedy
