"""The command: what each part prints, and how errors end."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folders import SHAPE, markdown, model_folder

import lazyllm
from lazyllm.commands import demo
from lazyllm.commands import main as cli

STAGES = '{"1": 0.6, "3": 0.3}'
Captured = pytest.CaptureFixture[str]


def test_info_is_a_table(capsys: Captured) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"version               {lazyllm.__version__}" in out
    assert "cuda                  off" in out


EACH = ("info", "generate", "convert", "demo", "longbench", "ruler", "niah", "reproduce", "sweep", "search")


@pytest.mark.parametrize("command", [[], *([name] for name in EACH)])
def test_help_shows_an_example(command: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    example = capsys.readouterr().out.partition("example:")[2]
    assert example.strip().startswith(" ".join(["lazyllm", *command]))


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_the_harness_command_has_help_of_its_own(arguments: list[str], capsys: Captured) -> None:
    assert cli.main(["lm-eval", *arguments]) == 0
    assert "example:\n  lazyllm lm-eval --model lazyllm" in capsys.readouterr().out


def test_without_the_harness_its_extra_is_named(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lazyllm.evaluation.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert cli.main(["lm-eval", "--model", "lazyllm"]) == cli.USAGE_ERROR
    assert "pip install 'lazyllm-engine[lm-eval]'" in capsys.readouterr().err


def test_generate_prints_text_and_figures(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lazyllm.load(folder).generate("The sea", pruning={1: 0.6, 3: 0.3}, max_new_tokens=7)
    monkeypatch.setattr("lazyllm.checkpoints.pypi_models.demo_model", lambda: folder)
    for model in ([], ["--model", str(folder)]):
        call = ["generate", *model, "--prompt", "The sea", "--pruning", STAGES, "--max-new-tokens", "7"]
        assert cli.main(call) == 0
        out, err = capsys.readouterr()
        assert out == made.text + "\n"
        assert "7 prompt tokens" in err
        assert "finished by length, {1: 0.6, 3: 0.3}]" in err
        assert len(err.splitlines()) == 1


def test_generate_reads_files_and_standard_input(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Thé sea", encoding="utf-8")
    shown = set()
    for source in ("--prompt", "Thé sea"), ("--prompt", "-"), ("--prompt-file", "-"), ("--prompt-file", path):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Thé sea"))
        assert cli.main(["generate", "--model", str(folder), *map(str, source), "--max-new-tokens", "3"]) == 0
        shown.add(capsys.readouterr().out)
    assert len(shown) == 1


def test_generate_takes_every_option(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "map.html"
    arguments = "--chat --temperature 1 --top-p 0.9 --top-k 50 --seed 3 --stop x --stop y --threads 1"
    call = ["generate", "--model", str(folder), "--prompt", "Hi", "--heatmap", str(page), *arguments.split()]
    assert cli.main([*call, "--device", "cpu", "--max-new-tokens", "5"]) == 0
    assert f"[wrote {page}]" in capsys.readouterr().err
    assert "lazyllm-map" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--temprature 1", "unrecognized arguments: --temprature 1"),
        ("--speedup 2 --pruning dense", "argument --pruning: not allowed with argument --speedup"),
    ],
)
def test_an_unknown_or_doubled_option_shows_the_usage_of_its_command(
    options: str, words: str, capsys: Captured
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--prompt", "Hi", *options.split()])
    error = capsys.readouterr().err
    assert error.startswith("usage: lazyllm generate")
    assert words in error


def test_an_interrupted_run_goes_on_and_says_what_it_cannot_draw(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ["niah", "--model", str(folder), "--lengths", "560", "--depths", "50", "--out", str(tmp_path / "run")]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("lazyllm.evaluation.run.result_row", stop)
        patched.setattr("lazyllm.checkpoints.gguf.convert", stop)
        assert cli.main(["convert", "model.gguf", str(tmp_path / "folder")]) == cli.INTERRUPTED
        assert capsys.readouterr().err == "lazyllm: interrupted\n"
        assert cli.main(call) == cli.INTERRUPTED
    assert capsys.readouterr().err.splitlines()[-1] == "lazyllm: interrupted; the same command goes on from here"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(call) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "no pictures: they need pip install 'lazyllm-engine[plots]'"
    assert "No pictures: " in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")


def test_an_error_is_one_line_and_code_2(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    hi = ["generate", "--model", str(folder), "--prompt", "Hi"]
    nowhere = str(tmp_path / "nowhere")
    for call, words in (
        ([*hi, "--pruning", "{"], "pruning is not JSON"),
        ([*hi, "--pruning", '{"1": 2}'], "layer 1 must be above 0 and at most 1, not 2.0"),
        ([*hi, "--pruning", '{"9": 0.5}'], "layer 9 is out of reach: it must be below 5"),
        ([*hi, "--temperature", "-1"], "temperature must be 0 or above"),
        ([*hi, "--max-new-tokens", "0"], "max_new_tokens must be from 1"),
        ([*hi, "--max-new-tokens", "9000"], "the model's context is 600"),
        ([*hi, "--device", "cuda:9999"], "cuda"),
        ([*hi, "--threads", "0"], "threads must be from 1 to 1024"),
        ([*hi, "--revision", "main"], "revision is for hub ids"),
        (["generate", "--model", nowhere, "--prompt", "Hi"], "nowhere"),
        (["generate", "--model", str(folder), "--prompt-file", nowhere], "nowhere"),
        (["convert", nowhere, str(tmp_path / "out")], "nowhere"),
    ):
        assert cli.main(call) == 2
        out, err = capsys.readouterr()
        assert out.strip() == ""
        assert err.startswith("lazyllm: ")
        assert words.lower() in err.lower()
        assert len(err.splitlines()) == 1


def test_wrong_usage_is_code_2(capsys: Captured) -> None:
    lengths = ["niah", "--model", "x", "--lengths", "1024,4k"]
    for call in ([], ["nonsense"], ["generate", "--model", "x"], ["generate", "--prompt"], lengths):
        with pytest.raises(SystemExit) as ended:
            cli.main(call)
        assert ended.value.code == 2
        assert "usage: lazyllm" in capsys.readouterr().err


OUTPUTS = ("demo", "longbench", "ruler --lengths 100", "niah --lengths 100", "reproduce table1")
OUTPUTS += ("sweep --space {}", "search")


@pytest.mark.parametrize("call", ["generate --prompt Hi", "calibrate", *OUTPUTS])
def test_output_paths_are_checked_before_the_model_is_loaded(
    call: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **more: object) -> None:
        raise AssertionError("the model is loaded")

    def refused(path: Path, words: str) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main([*call.split(), option, str(path)])
        assert ended.value.code == 2
        assert re.search(f"argument {option}: .*{words}", capsys.readouterr().err.splitlines()[-1])

    monkeypatch.setattr("lazyllm.llm.load", load)
    monkeypatch.setattr("lazyllm.checkpoints.pypi_models.demo_model", load)
    (file := tmp_path / "file").touch()
    option = "--heatmap" if call.startswith("generate") else "--out"
    if call.startswith(("generate", "calibrate")):
        refused(tmp_path, "is a folder; give a file")
        refused(tmp_path / "no" / "a.json", "there is no folder")
    else:
        refused(file, "is a file; give a folder")
        refused(file / "below", "is a file; give a folder")
    if call == "calibrate":
        refused(file, "ends with .json")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    refused(tmp_path / "new.json", f"{tmp_path} cannot be written to")


def test_text_that_is_not_utf8_is_refused(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = b"caf\xe9".decode("utf-8", "surrogateescape")  # as Python hands over the bytes of sys.argv
    file = tmp_path / "latin-1.txt"
    file.write_bytes(b"caf\xe9")
    monkeypatch.setattr(sys, "stdin", io.StringIO(broken))  # as in the C locale
    for arguments, words in (
        (["--prompt", broken], "the text has a lone surrogate at index 3"),
        (["--prompt", "-"], "the text has a lone surrogate at index 3"),
        (["--prompt-file", str(file)], f"{file} is not valid UTF-8"),
    ):
        assert cli.main(["generate", "--model", str(folder), "--max-new-tokens", "1", *arguments]) == 2
        assert f"lazyllm: {words}" in capsys.readouterr().err


@pytest.mark.usefixtures("no_pictures", "no_bars")
@pytest.mark.parametrize(
    "call", ["niah --lengths 600 --depths 0,100", "longbench --max-length 600 --datasets niah_single_1 --limit 1"]
)
def test_tables_on_the_terminal_are_aligned_text(call: str, tmp_path: Path, capsys: Captured) -> None:
    model, out = model_folder(tmp_path / "model", replace(SHAPE, context=4000)), tmp_path / "out"
    rest = ["--pruning", "dense", "--pruning", '{"1": 0.5}', "--warm-ups", "0", "--threads", "1"]
    assert cli.main([*call.split(), "--model", str(model), "--out", str(out), "--device", "cpu", *rest]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert any(line.startswith(f"wrote {out}") for line in lines)
    how = "for LongBench itself: pip install huggingface_hub, then --data hub:THUDM/LongBench"
    assert (how in printed.err) == call.startswith("longbench")
    assert not markdown(printed.out)


@pytest.mark.parametrize(("debug", "shown"), [("1", True), ("0", False), ("", False)])
def test_a_traceback_is_shown_where_it_is_asked_for(
    debug: str, shown: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("LAZYLLM_DEBUG", debug)
    assert cli.main(["generate", "--model", str(folder), "--prompt", "Hi", "--pruning", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("lazyllm: pruning is 'x'")
    assert (lines[0] == "Traceback (most recent call last):") == shown == (len(lines) > 1)


def test_it_runs_as_a_module_and_a_closed_pipe_is_no_traceback() -> None:
    command = f"set -o pipefail; {sys.executable} -m lazyllm info | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_demo_compares_dense_and_pruned(
    folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a random model, whose answers are wrong; `make demo` fails where a real model's are."""
    document = tmp_path / "document.txt"
    document.write_text("The smallest bell is called Sparrow. " * 10)
    monkeypatch.setattr(demo, "DOCUMENT", document)
    assert cli.main(["demo", "--model", str(folder), "--out", str(tmp_path / "out")]) == 1
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["right"].count("NO (it is Lindau)") == 2
    shares = [int(share) for share in re.findall(r"\b(\d+)%", lines["computed at the first token"])]
    assert shares[0] == 100 > shares[1]  # counted, so that it holds on any machine
    assert lines["first token (median of 3 runs)"].count(" s") == 2
    assert "<title>" in (tmp_path / "out" / "demo.html").read_text(encoding="utf-8")
