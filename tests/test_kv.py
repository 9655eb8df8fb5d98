"""K and V in 16 bits: the method with rounded keys and values, whatever the kernels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tolerances
from comparison import converse, per_layer
from conftest import ROUNDED
from reference import Reference
from safetensors import safe_open

import lazyllm
from lazyllm import LLM, _core
from lazyllm.commands.main import main
from lazyllm.evaluation.conditions import conditions_of_model

KV = ["f16", "bf16"]
SHAPE = tiny.Shape(seed=12, n_layers=5, n_heads=6, n_kv_heads=2, head_dim=18, windows=(0, 40, 0, 0, 0))
STAGES = tiny.pruning([(1, 0.6), (3, 0.3)], queries=3, decode=[(0, 0.8), (2, 0.3)], memory=0.8)
PASSES = [(90, False), (1, True), (1, True), (30, False), (1, True)]
VARIANTS = _core.features()["instruction_sets"].split()

pytestmark = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="on CUDA K and V have the activations' type")


@pytest.mark.parametrize("isa", VARIANTS)
@pytest.mark.parametrize("kv", KV)
def test_the_method_with_rounded_keys_and_values(
    kv: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets are those of the reference, and logits far closer to its own than to those of exact K and V."""
    monkeypatch.setenv("LAZYLLM_CPU", isa)
    made = tiny.build(SHAPE, tmp_path)
    session = made.load(threads=2, kv=kv).session(STAGES)
    session.trace = True
    rounded, exact = (Reference(made.config, made.weights, STAGES, kv=dtype) for dtype in (kv, "f32"))
    revived, errors = 0, []
    for number, (count, generated) in enumerate(PASSES):
        ids = made.ids(count, number)
        got = session.forward(ids, generated)
        want, other = rounded.forward(ids, generated), exact.forward(ids, generated)
        assert rounded.margin > tolerances.KV_NEAR_TIE
        assert session.last_pass.tolist() == rounded.last_pass.tolist()
        assert session.depths.tolist() == rounded.depths
        assert per_layer(session.last_trace, 5) == per_layer(rounded.last_trace, 5)
        errors.append((tolerances.error(got, want), tolerances.error(got, other)))
        assert errors[-1][0] < tolerances.KV_LOGITS
        revived += session.last_pass[:, 2].sum()
    assert revived > 0
    close, far = np.mean(errors, axis=0)
    assert close < far / (2 if kv == "f16" else 10)


@pytest.mark.parametrize("compute", ["f32", *ROUNDED])
@pytest.mark.parametrize("kv", KV)
def test_threads_change_no_bit(kv: str, compute: str, tmp_path: Path) -> None:
    made = tiny.build(SHAPE, tmp_path)
    models = [made.load(threads, kv=kv, compute=compute) for threads in (1, 3)] + [made.load(compute=compute)]
    alone, several, exact = (converse(model.session(STAGES), made, PASSES) for model in models)
    assert several == alone
    assert not any(got["logits"] == want["logits"] for got, want in zip(alone, exact, strict=True))


@pytest.mark.parametrize("kv", KV)
def test_a_policy_sees_what_is_kept(kv: str, folder: Path) -> None:
    seen = []

    class Mine(lazyllm.Policy):
        def score(self, view: Any) -> Any:
            seen.append((view.keys(), view.values(), view.attention(1)))
            return view.attention(1).mean(axis=(0, 1))

    llm = lazyllm.load(folder, threads=1, kv=kv)
    own, paper = llm.session(Mine({2: 0.3})), llm.session({2: 0.3})
    np.testing.assert_array_equal(own.forward(range(50)), paper.forward(range(50)))
    for array in seen[0]:
        assert array.dtype == np.float32
    for array in seen[0][:2]:
        np.testing.assert_array_equal(array, tiny.decode(tiny.encode(array, kv.upper()), kv.upper()))


def later(session: lazyllm.Session) -> tuple[Any, ...]:
    answer = session.ask([9, 8], max_new_tokens=5)
    return answer.token_ids, session.forward([11, 12]).tobytes(), session.depths.tolist()


@pytest.mark.parametrize("kv", KV)
def test_forks_and_saved_sessions_go_on_to_the_bit(kv: str, folder: Path, tmp_path: Path) -> None:
    llm = lazyllm.load(folder, threads=1, kv=kv)
    session, file = llm.session({1: 0.6, 3: 0.3}), tmp_path / "kept"
    session.ask(range(40, 90), max_new_tokens=6)
    session.save(file)
    with safe_open(file, framework="np") as opened:
        types = [opened.get_slice(name).get_dtype() for name in ("keys.5", "values.0", "aux.4")]
        assert types == [kv.upper(), kv.upper(), "F32"]
    fork, restored = session.fork(), llm.restore(file)
    want = later(session)
    assert later(fork) == want
    assert later(restored) == want
    with pytest.raises(ValueError, match=f"a session with kv {kv.upper()}; here it is F32"):
        lazyllm.load(folder, device="cpu", threads=1).restore(file)


@pytest.mark.parametrize("kv", KV)
def test_half_the_memory(kv: str, folder: Path) -> None:
    shape = lazyllm.load(folder, threads=1).config
    exact, halved = (lazyllm.load(folder, threads=1, kv=dtype).session().core for dtype in ("f32", kv))
    kept = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * 4 * 500
    assert exact.bytes_for(500) - halved.bytes_for(500) == kept // 2


def test_a_value_beyond_f16_names_the_layer(tmp_path: Path) -> None:
    """And leaves the session as it was; bf16 has room for it."""
    made = tiny.build(SHAPE, tmp_path)
    large = {f"model.layers.3.self_attn.{name}_proj.weight": 1e6 for name in ("v", "k")}
    for name, factor in large.items():
        (place := tmp_path / name).mkdir()
        grown = tiny.build(SHAPE, place, {name: tiny.random_weights(SHAPE)[name] * factor})
        session = grown.load(kv="f16").session(None)
        message = 'layer 3: RoPE: a key or value is beyond 65504, the largest number of kv="f16": use'
        with pytest.raises(ValueError, match=message):
            session.forward(made.ids(20))
        assert session.length == 0
        assert np.isfinite(grown.load(kv="bf16").session(None).forward(made.ids(20))).all()


def test_models_and_runs_tell_it(folder: Path, llm: LLM) -> None:
    rounded = lazyllm.load(folder, device="cpu", threads=1, kv="f16")
    assert (rounded.kv, llm.kv) == ("f16", "f32")
    assert "1 threads, K and V in f16)" in repr(rounded)
    assert "K and V" not in repr(llm)
    exact, halved = (conditions_of_model(model, "none", False)["kernels"] for model in (llm, rounded))
    assert (exact, halved) == (llm.core.isa, f"{llm.core.isa}, K and V in f16")


def test_commands_take_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["generate", "--model", str(folder), "--prompt", "Hello", "--max-new-tokens", "2"]
    assert main([*said, "--kv", "bf16"]) == 0
    assert main([*said, "--kv", "f8"]) == 2
    assert "kv must be f32, f16 or bf16, not 'f8'" in capsys.readouterr().err
