"""The Python interface: loading, sessions, prompts of every form, what is printed, what is refused."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import SHAPE, model_folder

import lazyllm
from lazyllm import LLM, Pruning, SamplingParams, _core, memory, progress

STAGES = Pruning({1: 0.6, 3: 0.3})
IDS = list(range(40, 90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return lazyllm.load(folder, threads=1)


# ---- the module ------------------------------------------------------------------------------------


def test_import_does_no_work() -> None:
    heavy = "('numpy', 'lazyllm._core', 'tokenizers')"
    code = f"import sys, lazyllm; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_modules_come_with_the_package() -> None:
    code = "import lazyllm; print(lazyllm.longbench.run.__name__, lazyllm.reproduce.reproduce.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["run", "reproduce"]


def test_every_public_name_is_there() -> None:
    for name in lazyllm.__all__:
        assert getattr(lazyllm, name) is not None
        assert name in dir(lazyllm)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        lazyllm.nonsense  # noqa: B018
    assert issubclass(lazyllm.CheckpointError, ValueError)
    assert issubclass(lazyllm.DeviceError, RuntimeError)


def test_ships_its_types() -> None:
    package = resources.files("lazyllm")
    assert package.joinpath("py.typed").is_file()
    assert package.joinpath("_core.pyi").is_file()


def test_info_prints_as_a_table() -> None:
    info = lazyllm.info()
    assert info["version"] == lazyllm.__version__
    assert info["instruction_set_used"] in info["instruction_sets"]
    assert info["cuda"].startswith("off")
    assert "numpy" in info["packages"]
    assert len(repr(info).splitlines()) == len(info)
    assert "<table>" in info._repr_html_()


def test_info_names_the_unrelated_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyllm import environment

    monkeypatch.setattr(environment, "version", lambda name: "0.5" if name == "lazyllm" else None)
    assert "unrelated distribution lazyllm 0.5" in lazyllm.info()["warning"]


# ---- load ------------------------------------------------------------------------------------------


def test_load_says_what_it_opened(llm: LLM) -> None:
    assert llm.config.n_layers == SHAPE.n_layers
    assert llm.device == "cpu"
    assert llm.threads == 1
    assert f"{SHAPE.n_layers} layers of {SHAPE.hidden}" in repr(llm)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_is_refused_not_replaced(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAZYLLM_CUDA_LIBRARY", str(tmp_path / "missing.so"))
    with pytest.raises(lazyllm.DeviceError, match=r"the CUDA core does not load: .*missing\.so"):
        lazyllm.load(folder, device=device)
    assert lazyllm.info()["cuda"].startswith("off: the CUDA core does not load")


def test_a_cuda_core_of_another_version_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYLLM_CUDA_LIBRARY", _core.__file__)  # a library, but not that one
    with pytest.raises(lazyllm.DeviceError, match="is of another version than this core"):
        lazyllm.load(folder, device="cuda")


def test_auto_says_what_it_took(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAZYLLM_CUDA_LIBRARY", str(tmp_path / "missing.so"))
    with caplog.at_level("INFO", logger="lazyllm"):
        lazyllm.load(str(folder), device="auto", dtype="float32", threads=1)
    assert 'device="auto" took the CPU' in caplog.text


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"device": "tpu"}, ValueError, "auto, cpu, cuda or cuda:N, not 'tpu'"),
        ({"device": 0}, TypeError, "device must be a string"),
        ({"dtype": "int8"}, ValueError, "stores float32, and weights are used as stored"),
        ({"threads": 0}, ValueError, "threads must be 1 to 1024"),
        ({"threads": 1.5}, TypeError, "threads must be a whole number or None"),
        ({"threads": True}, TypeError, "threads must be a whole number or None"),
    ],
)
def test_load_refuses(folder: Path, arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        lazyllm.load(folder, **arguments)


def test_load_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-folder"):
        lazyllm.load(tmp_path / "no-such-folder")
    with pytest.raises(lazyllm.CheckpointError, match=r"config\.json"):
        lazyllm.load(tmp_path)
    with pytest.raises(TypeError, match="path must be a folder or a hub id"):
        lazyllm.load(7)  # type: ignore[arg-type]


# ---- prompts in, answers out -----------------------------------------------------------------------


def test_a_prompt_may_be_text_ids_or_an_array(llm: LLM) -> None:
    text = "The sea was calm."
    ids = llm.tokenizer.encode(text)
    made = llm.generate(text, max_new_tokens=6)
    for form in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint16)):
        assert llm.generate(form, max_new_tokens=6).token_ids == made.token_ids
    assert made.prompt_ids == ids
    assert made.tokenize_seconds > 0


def test_a_list_of_prompts_gives_a_list(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    texts = ["One.", "Two, and some more."]
    made = llm.generate(texts, pruning=STAGES, max_new_tokens=4)
    assert "prompts: 100%" in capfd.readouterr().err
    assert [g.token_ids for g in made] == [
        llm.generate(text, pruning=STAGES, max_new_tokens=4).token_ids for text in texts
    ]
    same = llm.generate([llm.tokenizer.encode(text) for text in texts], pruning=STAGES, max_new_tokens=4)
    assert [g.token_ids for g in same] == [g.token_ids for g in made]


def test_progress_can_be_turned_off(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(["One.", "Two."], max_new_tokens=2, progress=False)
    monkeypatch.setenv("LAZYLLM_PROGRESS", "0")
    llm.generate(["One.", "Two."], max_new_tokens=2)
    assert capfd.readouterr() == ("", "")


def test_a_long_prompt_shows_a_bar(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LONG_PROMPT", 500)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    llm.generate(list(range(250)) * 2, max_new_tokens=2)
    shown = capfd.readouterr().err
    assert "prefill of 500 tokens" in shown
    assert f"0/{SHAPE.n_layers}" in shown


def test_nothing_is_printed(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate("Nothing to see here.", max_new_tokens=3, trace=True)
    assert capfd.readouterr() == ("", "")


def test_chat_uses_the_template(llm: LLM) -> None:
    made = llm.generate("Hello", chat=True, max_new_tokens=2)
    shown = llm.tokenizer.decode(made.prompt_ids, skip_special_tokens=False)
    assert shown == "<s><turn>user\nHello</s>\n<turn>assistant\n"


def test_a_folder_without_tokenizer_takes_ids(tmp_path: Path) -> None:
    bare = lazyllm.load(model_folder(tmp_path, tokenizer=False), threads=1)
    made = bare.generate(IDS, pruning=STAGES, max_new_tokens=3, trace=True)
    assert (len(made.token_ids), made.text) == (3, "")
    assert made.trace is not None
    assert " 40" in made.trace.heatmap()._repr_html_()
    with pytest.raises(lazyllm.CheckpointError, match=r"neither tokenizer\.json nor"):
        bare.generate("text")


def test_generation_prints(llm: LLM) -> None:
    made = llm.generate(IDS, pruning=STAGES, max_new_tokens=3)
    assert str(made).startswith(made.text)
    for part in ("50 prompt tokens", "3 tokens in", "% computed", "finished by length", repr(STAGES)):
        assert part in str(made)
        assert part in repr(made)
    assert "\n" not in repr(made)


def test_html_is_escaped(llm: LLM) -> None:
    from dataclasses import replace

    made = replace(llm.generate(IDS, max_new_tokens=2), text="<script>alert(1)</script> & more")
    html = made._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html
    assert "<table>" in html


# ---- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "words"),
    [
        ([], {}, ValueError, "the prompt is empty"),
        ([300], {}, ValueError, "token id 300 at index 0 is not from 0 to 299"),
        ([5, -1], {}, ValueError, "token id -1 at index 1"),
        ([0.5, 1.5], {}, TypeError, "whole numbers, not float64"),
        ([[5], "a"], {}, None, ""),
        (b"bytes", {}, TypeError, "must be text, token ids or a list of those, not bytes"),
        (None, {}, TypeError, "not NoneType"),
        (7, {}, TypeError, "not int"),
        ([5], {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1"),
        ([5], {"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be a whole number"),
        (
            [5],
            {"max_new_tokens": 600},
            ValueError,
            "1 given and 600 to be generated make 601; .* context is 600",
        ),
        ([5], {"stop": ""}, ValueError, "must not be empty"),
        ([5], {"stop": [3]}, TypeError, "stop must be a string or strings, not 3"),
        ([5], {"sampling": 0.7}, TypeError, "sampling must be a lazyllm.SamplingParams"),
        ([5], {"pruning": {10: 0.5}}, TypeError, "pruning must be a lazyllm.Pruning or None"),
        ([5], {"pruning": Pruning({5: 0.5})}, ValueError, "layer 5 is out of reach: the model has 6 layers"),
        ([5], {"chat": True}, TypeError, "chat=True needs a prompt of text"),
    ],
)
def test_generate_refuses(
    llm: LLM, prompt: Any, options: dict[str, Any], kind: type[Exception] | None, words: str
) -> None:
    if kind is None:
        assert len(llm.generate(prompt, max_new_tokens=1, **options)) == len(prompt)
        return
    with pytest.raises(kind, match=words):
        llm.generate(prompt, **options)


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ({"temperature": -1}, ValueError, "temperature must be 0 or above"),
        ({"temperature": float("nan")}, ValueError, "temperature must be 0 or above"),
        ({"temperature": "1"}, TypeError, "temperature must be a number"),
        ({"top_p": 0}, ValueError, "top_p must be above 0"),
        ({"top_p": 1.5}, ValueError, "at most 1, not 1.5"),
        ({"top_k": -1}, ValueError, "top_k must be from 0"),
        ({"top_k": 1.5}, TypeError, "top_k must be a whole number"),
        ({"seed": -1}, ValueError, "seed must be from 0"),
        ({"seed": None}, TypeError, "seed must be a whole number"),
    ],
)
def test_sampling_refuses(values: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        SamplingParams(**values)


def test_stream_takes_one_prompt(llm: LLM) -> None:
    with pytest.raises(TypeError, match="stream takes one prompt"):
        llm.stream(["a", "b"])  # type: ignore[arg-type]


def test_memory_is_estimated_before_it_is_taken(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = memory.session_bytes(llm.config, 53)
    monkeypatch.setattr(memory, "available_bytes", lambda: asked - 1)
    with pytest.raises(MemoryError, match=f"53 tokens needs {asked} bytes .* {asked - 1} "):
        llm.generate(IDS, max_new_tokens=3)
    monkeypatch.setattr(memory, "available_bytes", lambda: asked)
    assert len(llm.generate(IDS, max_new_tokens=3).token_ids) == 3


def test_available_memory_is_known_here() -> None:
    available = memory.available_bytes()
    if sys.platform == "linux":
        assert available is not None
        assert available > 0


# ---- sessions --------------------------------------------------------------------------------------


def test_forward_gives_logits(llm: LLM) -> None:
    session = llm.session()
    logits = session.forward(np.array(IDS))
    assert (logits.shape, logits.dtype) == ((SHAPE.vocab,), np.float32)
    assert int(logits.argmax()) == llm.generate(IDS, max_new_tokens=1).token_ids[0]
    assert (session.length, session.kinds.tolist()) == (50, [0] * 50)
    assert session.depths.tolist() == [SHAPE.n_layers] * 50
    session.forward([7], generated=True)
    assert session.kinds.tolist() == [0] * 50 + [1]
    assert "51 tokens" in repr(session)


def test_what_a_session_reports_is_a_copy(llm: LLM) -> None:
    session = llm.session(STAGES)
    session.forward(IDS)
    for name in ("depths", "kinds", "last_pass"):
        getattr(session, name)[:] = 99
        assert 99 not in getattr(session, name)
    assert session.last_pass.shape == (SHAPE.n_layers, 3)
    assert 0 < session.reached_top < session.computed < 1


def test_forward_grows_token_by_token_to_the_context(llm: LLM) -> None:
    session = llm.session()
    for token in range(130):
        logits = session.forward([token])
    assert np.allclose(logits, llm.session().forward(list(range(130))), atol=1e-5)
    with pytest.raises(
        ValueError, match="130 tokens in the session, 471 given and 0 to be generated make 601"
    ):
        session.forward([1] * 471)
    session.forward([1] * 470)
    assert session.length == 600


def test_a_follow_up_continues_the_same_context(llm: LLM) -> None:
    session = llm.session()
    first = session.ask("What is the sea?", max_new_tokens=5)
    second = session.ask(" And the wind?", max_new_tokens=5)
    follow_up = llm.tokenizer.encode(" And the wind?", add_special=False)
    whole = first.prompt_ids + first.token_ids + follow_up
    assert second.prompt_ids == follow_up
    assert second.token_ids == llm.generate(whole, max_new_tokens=5).token_ids
    assert session.length == len(whole) + 4
    kinds = [0] * len(first.prompt_ids) + [1] * 5 + [0] * len(follow_up) + [1] * 4
    assert session.kinds.tolist() == kinds


def test_a_chat_goes_on_by_its_template(llm: LLM) -> None:
    session = llm.session(STAGES)
    first = session.ask("Hello", chat=True, max_new_tokens=3)
    second = session.ask("And you?", chat=True, max_new_tokens=3)
    decode = llm.tokenizer.decode
    assert (
        decode(first.prompt_ids, skip_special_tokens=False) == "<s><turn>user\nHello</s>\n<turn>assistant\n"
    )
    assert decode(second.prompt_ids, skip_special_tokens=False) == (
        "</s>\n<turn>user\nAnd you?</s>\n<turn>assistant\n"
    )


def test_a_chat_that_ended_by_its_end_token_does_not_repeat_it(llm: LLM) -> None:
    session = llm.session()
    session.ask("Hello", chat=True, max_new_tokens=1)
    session._pending = [llm.tokenizer.eos_token_id]  # as if that had been drawn
    second = session.ask("And you?", chat=True, max_new_tokens=1)
    shown = llm.tokenizer.decode(second.prompt_ids, skip_special_tokens=False)
    assert shown == "\n<turn>user\nAnd you?</s>\n<turn>assistant\n"


def test_a_failed_ask_changes_nothing(llm: LLM) -> None:
    session = llm.session()
    session.ask("Hello", chat=True, max_new_tokens=2)
    before = session.length
    with pytest.raises(ValueError, match="the model's context is 600"):
        session.ask("And you?", chat=True, max_new_tokens=600)
    with pytest.raises(TypeError, match="chat=True needs"):
        session.ask(IDS, chat=True)
    assert session.length == before
    assert len(session.ask("And you?", chat=True, max_new_tokens=2).token_ids) == 2


def test_a_session_interrupted_after_its_pass_refuses_to_go_on(llm: LLM) -> None:
    """Ctrl-C may come when the core has run the tokens and Python has not taken note of them yet."""
    session = llm.session()
    session.forward([5, 6])
    session.core.forward([7])
    for use in (lambda: session.forward([8]), lambda: session.ask("8", max_new_tokens=1)):
        with pytest.raises(RuntimeError, match="did not finish; open a new session"):
            use()


def test_numbers_beyond_all_bounds_are_values_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="too large"):
        Pruning({1: 10**400})
    with pytest.raises(ValueError, match="temperature is too large"):
        SamplingParams(temperature=10**400)
    with pytest.raises(ValueError, match="threads must be 1 to 1024"):
        lazyllm.load(folder, threads=2**40)
