"""The Python interface: loading, sessions, every form of prompt, printed forms and refused arguments."""

import inspect
import pydoc
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import python
from folders import IDS, SHAPE, STAGES, model_folder

import lazyllm
from lazyllm import LLM, SamplingParams, _core
from lazyllm.checkpoints.gguf import convert
from lazyllm.checkpoints.pypi_models import default_cache
from lazyllm.commands.options import out_file, out_folder, read_prompt
from lazyllm.document import Document, DocumentChat
from lazyllm.evaluation.longbench.tasks import find_templates
from lazyllm.evaluation.options import DataOptions, NiahOptions, RulerOptions
from lazyllm.generation import Request
from lazyllm.machine import info as environment
from lazyllm.machine import memory
from lazyllm.support import progress

ONE_ITEM: Any = {
    **{"datasets": ["niah_single_1"], "limit": 1, "max_length": 600, "max_new_tokens": 2},
    **{"warm_ups": 0, "progress": False},
}


@dataclass(frozen=True)
class Shorter(lazyllm.Method):
    compresses = True

    def compress(self, llm: Any, text: str) -> str:
        return text[1:]


TAKERS: list[tuple[Callable[..., Any], type, set[str]]] = [
    (lazyllm.longbench.run, DataOptions, set()),
    (lazyllm.longbench.run_ruler, RulerOptions, set()),
    (lazyllm.longbench.run_niah, NiahOptions, set()),
    (lazyllm.sweep, DataOptions, set()),
    (lazyllm.reproduce.reproduce, DataOptions, {"max_length", "wrapper"}),
    *((function, Request, {"never_first"}) for function in (LLM.generate, LLM.stream, lazyllm.Session.ask)),
    *((ask, Request, {"never_first", "chat"}) for ask in (Document.ask, Document.stream, DocumentChat.ask)),
]


@pytest.mark.parametrize(("function", "kind", "others"), TAKERS, ids=[call.__qualname__ for call, *_ in TAKERS])
def test_help_shows_each_option_and_an_unknown_one_is_told_the_nearest(
    function: Callable[..., Any], kind: Any, others: set[str]
) -> None:
    shown = inspect.signature(function).parameters
    assert "options" not in shown
    assert inspect.signature(inspect.unwrap(function)).parameters == shown  # which pdoc shows
    for option in fields(kind):
        if option.name in others:
            assert option.name not in shown or shown[option.name].default is None
        elif option.default_factory is MISSING:
            default = inspect.Parameter.empty if option.default is MISSING else option.default
            assert shown[option.name].default == default
            assert shown[option.name].annotation is not inspect.Parameter.empty
    help_text = pydoc.plain(pydoc.render_doc(function))
    assert all(f"{name}:" in help_text for name in shown if name != "self")
    for options, words in (
        ({"progres": False}, f"{function.__name__} has no option 'progres'; did you mean progress"),
        ({"xyz": False}, f"{function.__name__} has no option 'xyz'; expected one of "),
        ({}, f"{function.__name__}: missing a required argument: "),
    ):
        with pytest.raises(TypeError, match=words):
            function(**options)


# ---- the module ------------------------------------------------------------------------------------


def test_source_without_its_core_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazyllm._core", None)
    monkeypatch.delattr(lazyllm, "_core")
    with pytest.raises(ImportError, match=r"source without its compiled core .*pip install -e"):
        exec("from lazyllm import _core")


def test_imports_do_no_work() -> None:
    """Nor does Chinese text, whose package is chatty, print anything."""
    script = """
import sys, lazyllm
from lazyllm.commands.main import parser
parser()
print({"numpy", "tokenizers", "jinja2", "matplotlib", "tqdm", "lazyllm._core"} & set(sys.modules))
print(lazyllm.longbench.run.__name__, lazyllm.reproduce.reproduce.__name__)
import lazyllm.sweeps.sweep
print({"rouge", "jieba", "rapidfuzz", "distributed", "dask", "pandas", "matplotlib"} & set(sys.modules))
print(lazyllm.longbench.score("multifieldqa_zh", ["\u82f9\u679c"], [["\u82f9\u679c"]]))
"""
    told = python(script, PYTHONWARNINGS="ignore").splitlines()
    assert told == ["set()", "run reproduce", "set()", "100.0"]


def test_every_public_name_is_there() -> None:
    for name in lazyllm.__all__:
        assert getattr(lazyllm, name) is not None
        assert name in dir(lazyllm)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        lazyllm.nonsense  # noqa: B018
    assert issubclass(lazyllm.CheckpointError, ValueError)
    assert issubclass(lazyllm.DeviceError, RuntimeError)
    for name in ("py.typed", "_core.pyi"):
        assert resources.files("lazyllm").joinpath(name).is_file()


def test_info_prints_as_a_table_and_names_the_unrelated_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    info = lazyllm.info()
    assert info["version"] == lazyllm.__version__
    assert info["instruction_set_used"] in info["instruction_sets"]
    assert info["cuda"].startswith("off")
    assert "numpy" in info["packages"]
    assert len(repr(info).splitlines()) == len(info)
    monkeypatch.setattr(environment, "version", lambda name: "0.5" if name == "lazyllm" else None)
    assert "unrelated distribution lazyllm 0.5" in lazyllm.info()["warning"]


# ---- load ------------------------------------------------------------------------------------------


def test_cuda_is_refused_not_replaced_and_auto_says_what_it_took(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LAZYLLM_CUDA_LIBRARY", str(tmp_path / "missing.so"))
    for device in ("cuda", "cuda:1"):
        with pytest.raises(lazyllm.DeviceError, match=r"the CUDA core does not load: .*missing\.so"):
            lazyllm.load(folder, device=device)
    assert lazyllm.info()["cuda"].startswith("off: the CUDA core does not load")
    with caplog.at_level("INFO", logger="lazyllm"):
        lazyllm.load(str(folder), device="auto", threads=1)
    assert 'device="auto" took the CPU' in caplog.text
    monkeypatch.setenv("LAZYLLM_CUDA_LIBRARY", _core.__file__)  # a library without the CUDA core's symbol
    with pytest.raises(lazyllm.DeviceError, match="is of another version than this core"):
        lazyllm.load(folder, device="cuda")


def test_load_refuses(folder: Path) -> None:
    for arguments, kind, words in (
        ({"device": "tpu"}, ValueError, "auto, cpu, cuda, cuda:N or cuda:N,M, not 'tpu'"),
        ({"device": 0}, TypeError, "device must be a string"),
        ({"thread": 1}, TypeError, "load has no option 'thread'; did you mean threads"),
        ({"path": None}, TypeError, "path must be a folder, a GGUF file or a hub id such as owner/name, not None"),
        ({"path": ""}, TypeError, "path must be a folder"),
        ({"path": folder / "model.safetensors"}, ValueError, "is a file of a checkpoint; give the checkpoint's folder"),
        ({"revision": "main"}, ValueError, "revision is for hub ids"),
        ({"file": "q4.gguf"}, FileNotFoundError, "has no q4.gguf$"),
        ({"threads": 0}, ValueError, "threads must be from 1 to 1024"),
        ({"threads": 1.5}, TypeError, "threads must be a whole number, not 1.5"),
        ({"threads": True}, TypeError, "threads must be a whole number, not True"),
        ({"weights": "q5"}, ValueError, "weights must be auto, q8 or q4, not 'q5'"),
        ({"compute": "fp8"}, ValueError, "compute must be f32, bf16, int8 or fastest, not 'fp8'"),
        ({"compute": 16}, TypeError, "compute must be a string, not 16"),
        ({"compute": "bf16", "device": "cuda"}, ValueError, "compute is for the CPU"),
        ({"compute": "int8", "device": "cuda"}, ValueError, "compute is for the CPU"),
        ({"kv": "f64"}, ValueError, "kv must be f32, f16 or bf16, not 'f64'"),
        ({"kv": 16}, TypeError, "kv must be a string, not 16"),
        ({"kv": "f16", "device": "cuda"}, ValueError, 'kv is "f16"; the CUDA core keeps K and V as f32'),
    ):
        with pytest.raises(kind, match=words):
            lazyllm.load(**{"path": folder, **arguments})
    with pytest.raises(OSError, match="no-such-folder"):
        lazyllm.load(folder / "no-such-folder")


# ---- prompts and answers ---------------------------------------------------------------------------


def test_a_prompt_may_be_text_ids_or_an_array(llm: LLM) -> None:
    """A list of prompts in any of these forms gives a list."""
    text = "The sea was calm."
    ids = llm.tokenizer.encode(text)
    alone = llm.generate(text, STAGES, max_new_tokens=6)
    assert alone.prompt_ids == ids
    assert alone.tokenize_seconds > 0
    forms = [text, ids, tuple(ids), np.array(ids), np.array(ids, np.uint16)]
    answers = llm.generate(forms, STAGES, max_new_tokens=6)
    assert [answer.token_ids for answer in answers] == [alone.token_ids] * len(forms)
    assert llm.generate([]) == []


def test_a_list_is_checked_before_any_of_it_is_run(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("a prompt was run")

    monkeypatch.setattr(lazyllm.Session, "answer", run)
    with pytest.raises(ValueError, match="prompt 1: 700 given and 2"):
        llm.generate([IDS, [1] * 700, IDS], max_new_tokens=2)
    with pytest.raises(TypeError, match="prompt 2: a prompt must be text, token ids"):
        llm.generate([IDS, IDS, [0.5]], max_new_tokens=2)


def test_answers_made_before_a_failure_are_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, failures = lazyllm.Session.answer, iter([None, None, KeyboardInterrupt])

    def third_fails(*args: Any) -> Any:
        if failure := next(failures):
            raise failure
        return answer(*args)

    monkeypatch.setattr(lazyllm.Session, "answer", third_fails)
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate([IDS, IDS[:9], IDS, IDS], max_new_tokens=2)
    finished: list[Any] = caught.value.finished  # type: ignore[attr-defined]
    assert [len(answer.prompt_ids) for answer in finished] == [50, 9]
    assert "2 of 4 answers are in this exception's `finished`" in caught.value.__notes__[0]


def test_bars_of_lists_and_long_prompts_can_be_turned_off(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(["One.", "Two."], max_new_tokens=2)
    assert "prompts: 100%" in capfd.readouterr().err
    llm.generate(["One.", "Two."], max_new_tokens=2, progress=False)
    monkeypatch.setenv("LAZYLLM_PROGRESS", "0")
    llm.generate(["One.", "Two."], max_new_tokens=2)
    monkeypatch.delenv("LAZYLLM_PROGRESS")
    llm.generate("One short prompt shows nothing.", max_new_tokens=3, trace=True)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(progress, "LONG_PROMPT", 500)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    llm.generate(list(range(250)) * 2, max_new_tokens=2)
    shown = capfd.readouterr().err
    assert "prefill of 500 tokens" in shown
    assert f"0/{SHAPE.n_layers}" in shown


def test_a_chat_of_messages(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answers = llm.generate([messages, "Hello"], chat=True, max_new_tokens=2)
    for answer, chat in zip(answers, (messages, messages[1:]), strict=True):
        want = llm.tokenizer.apply_chat_template(chat)
        assert answer.prompt_ids == llm.generate(chat, max_new_tokens=2).prompt_ids == want
    with pytest.raises(ValueError, match="'bos_token' is taken"):
        llm.generate(messages, chat_template_kwargs={"bos_token": ""})


@pytest.mark.parametrize("pruning", [None, Shorter()])
def test_a_content_of_parts_is_their_text(llm: LLM, pruning: Any) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]
    whole, split = (
        llm.generate([{"role": "user", "content": content}], pruning, chat=True, max_new_tokens=1)
        for content in ("Hello there", parts)
    )
    assert split.prompt_ids == whole.prompt_ids


def test_a_folder_without_tokenizer_takes_ids(tmp_path: Path) -> None:
    bare = lazyllm.load(model_folder(tmp_path, tokenizer=False), threads=1)
    made = bare.generate(IDS, pruning=STAGES, max_new_tokens=3, trace=True)
    assert (len(made.token_ids), made.text) == (3, "")
    assert " 40" in made.trace.heatmap()._repr_html_()
    with pytest.raises(lazyllm.CheckpointError, match=r"neither tokenizer\.json nor"):
        bare.generate("text")


def test_generation_prints(llm: LLM) -> None:
    made = llm.generate(IDS, pruning=STAGES, max_new_tokens=3)
    assert str(made) == made.text
    for part in ("50 prompt tokens", "3 tokens in", "% computed", "finished by length", STAGES.label):
        assert part in repr(made)
    assert "\n" not in repr(made)
    html = replace(made, text="<script>alert(1)</script> & more")._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in html


# ---- refusals --------------------------------------------------------------------------------------


def said(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_generate_refuses(llm: LLM) -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    for prompt, options, kind, words in (
        (["a", 5], {}, TypeError, "prompt 1: a prompt must be text, token ids .*, not 5"),
        ([300], {}, ValueError, "token id 300 at index 0 is not from 0 to 299"),
        ([5, -1], {}, ValueError, "token id -1 at index 1"),
        ([0.5, 1.5], {}, TypeError, "whole numbers. or a list of messages, not .0.5, 1.5."),
        ([[5], [[5], [5, 6]]], {}, TypeError, "prompt 1: a prompt must be text, token ids"),
        (b"bytes", {}, TypeError, "or a list of messages, not b.bytes"),
        (None, {}, TypeError, "a prompt must be text, .*, not None"),
        ([[]], {}, ValueError, "prompt 0: the prompt is empty"),
        (np.array([], int), {}, ValueError, "the prompt is empty"),
        ("half \ud83d a pair", {}, ValueError, "a lone surrogate at index 5"),
        ([5], {"chat": True}, TypeError, "chat=True needs text or a list of messages"),
        ([said("Hi"), {"role": "usr", "content": "Hi"}], {}, ValueError, "the role of message 1 must be .*'usr'"),
        ([said([{"type": "image"}])], {}, ValueError, "text or parts .* it has the part {'type'"),
        ([said(5)], {}, TypeError, "content of message 0 must be text, not 5"),
        ([{"role": "user"}], {}, ValueError, "message 0 has no 'content'; it has 'role'"),
        ([said("Hi"), 5], {}, TypeError, "message 1 must be a dict with"),
        ([5], {"max_new_tokens": 0}, ValueError, "max_new_tokens must be from 1"),
        ([5], {"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be a whole number"),
        ([5], {"temperature": 1.0}, TypeError, r"no option 'temperature'; give it as sampling=SamplingParams\(tempera"),
        ([5], {"max_new_tokens": 600}, ValueError, "1 given and 600 to be generated make 601 tokens; .* is 600"),
        ([5], {"stop": ""}, ValueError, "must not be empty"),
        ([5], {"stop": 5}, TypeError, "stop must be a string or strings, not 5"),
        ([5], {"sampling": 0.7}, TypeError, "sampling must be a lazyllm.SamplingParams"),
        ([5], {"pruning": 0.5}, ValueError, "a speedup must be above 1, such as 2.0, not 0.5"),
        ([5], {"pruning": object()}, TypeError, "pruning must be a speedup such as 2.0, a lazyllm.Pruning"),
        ([5], {"n": 2}, ValueError, "n=2 answers differ only with sampling"),
        ([5], {"n": 0}, ValueError, "n must be from 1"),
        ([5], {"logprobs": -1}, ValueError, "logprobs must be from 0"),
        ([5], {"stop_token_ids": [-1]}, ValueError, "a stop token id must be from 0"),
        ("Hi", kwargs, ValueError, "they need chat=True"),
        ("Hi", {"tools": [{"type": "function"}]}, ValueError, "they need chat=True"),
        ("Hi", {"tools": "weather", "chat": True}, TypeError, "tools must be a list of dicts such as"),
        ("Hi", {"tools": [{"f": print}], "chat": True}, TypeError, "tools must hold strings, numbers, lists"),
    ):
        with pytest.raises(kind, match=words):
            llm.generate(prompt, **options)
    with pytest.raises(TypeError, match="stream takes one prompt"):
        llm.stream(["a", "b"])  # type: ignore[arg-type]


def test_sampling_refuses() -> None:
    for name, value, words in (
        ("temperature", -1, "temperature must be 0 or above"),
        ("temperature", float("nan"), "temperature must be finite"),
        ("temperature", 10**400, "temperature is too large"),
        ("temperature", None, "temperature must be a number, not None"),
        ("top_p", 0, "top_p must be above 0 and at most 1, not 0.0"),
        ("top_k", -1, "top_k must be from 0"),
        ("seed", 1.5, "seed must be a whole number"),
        ("repetition_penalty", 0, "repetition_penalty must be above 0"),
        ("min_p", 1.5, "min_p must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            SamplingParams(**{name: value})


def test_memory_is_estimated_before_it_is_taken(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = llm.session().core.bytes_for(53)
    monkeypatch.setattr(memory, "available_bytes", lambda: asked - 1)
    with pytest.raises(MemoryError, match=f"53 tokens needs {asked} bytes .* {asked - 1} "):
        llm.generate(IDS, max_new_tokens=3)
    monkeypatch.setattr(memory, "available_bytes", lambda: asked)
    assert len(llm.generate(IDS, max_new_tokens=3).token_ids) == 3


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_a_path_that_is_read_may_begin_with_the_home_folder(llm: LLM, home: Path) -> None:
    for read, arguments in (
        (lazyllm.load, ["~/none.gguf"]),
        (llm.restore, ["~/none"]),
        (llm.generate, ["Hi", "~/none.json"]),
        (llm.generate, ["Hi", Path("~/none.json")]),
        (lazyllm.Sweep.read, ["~/none"]),
        (lazyllm.Search.read, ["~/none"]),
        (lazyllm.longbench.Run, ["~/none"]),
        (lazyllm.longbench.merge, [["~/none"], "~/out"]),
        (partial(lazyllm.longbench.run, data="~/none", out="~/out"), [llm]),
        (partial(find_templates, prompts="~/none"), []),
        (convert, ["~/none", "~/out"]),
        (read_prompt, ["~/none"]),
    ):
        with pytest.raises((OSError, ValueError), match=rf"{home}/none"):
            read(*arguments)


def test_a_path_that_is_written_may_begin_with_the_home_folder(
    llm: LLM, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = llm.session(STAGES)
    made = session.ask("Hi", max_new_tokens=2, trace=True)
    session.save("~/session")
    assert llm.restore("~/session").length == session.length
    preset = lazyllm.Preset(STAGES, 2.0, "tiny", "0", {}, {"candidates": [{"pruning": "{}", "speedup": 2}]})
    written = [
        made.trace.heatmap().save("~/page.html"),
        preset.save("~/preset.json"),
        out_file("~/file"),
        out_folder("~/folder"),
        lazyllm.longbench.run(llm, out="~/run", **ONE_ITEM).plot("~/scores.png"),
        lazyllm.sweep(llm, {"stages": [STAGES.stages]}, out="~/sweep", **ONE_ITEM).plot("~/pareto.png"),
    ]
    assert {path.parent for path in written} == {home}
    monkeypatch.setenv("LAZYLLM_CACHE", "~/cache")
    assert default_cache() == home / "cache"
    assert (home / "run" / "report.md").exists()
    assert (home / "sweep" / "report.md").exists()
    assert not (home.parent / "~").exists()
