"""The lm-evaluation-harness on this engine: against the harness' own model over transformers, and pruned."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import BOS, EOS, TEMPLATE, model_folder
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from toys import Paper

import lazyllm
from lazyllm.commands import main as cli
from lazyllm.support import progress

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("one_thread")]
torch = pytest.importorskip("torch", reason="the harness' own model needs torch")
pytest.importorskip("transformers", reason="the harness' own model needs transformers")
lm_eval = pytest.importorskip("lm_eval", reason="needs the lm-evaluation-harness: pip install lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402 (needs it)
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from lazyllm.evaluation.harness import HarnessModel, default_device  # noqa: E402

STAGES = {"1": 0.5, "3": 0.3}
PAPER = Paper(STAGES)
TEXT = "The sea was calm, and the ship went on for days. Nobody on board knew where it was going, "
CONTEXTS = ["The sea", "The sea ", TEXT * 2, "", "é, ü", BOS + "Once"]
CONTINUATIONS = [" was calm", "x", " and went on", "é"]
PAIRS = [(context, continuation) for context in CONTEXTS for continuation in CONTINUATIONS]


@pytest.fixture(scope="module")
def ours(folder: Path) -> HarnessModel:
    return HarnessModel(str(folder), threads=1)


@pytest.fixture(scope="module")
def pruned(ours: HarnessModel) -> HarnessModel:
    return HarnessModel(ours.llm, STAGES)


def theirs(folder: Path, **options: Any) -> HFLM:
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", **options)


@pytest.fixture(scope="module")
def hf(folder: Path) -> HFLM:
    return theirs(folder)


def asked(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, call, index) for index, call in enumerate(arguments)]


def likelihoods(model: Any, pairs: list[tuple[str, str]] = PAIRS) -> list[tuple[float, bool]]:
    return list(model.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True))


def answers(model: Any, prompts: list[str], **options: Any) -> list[str]:
    requests = asked("generate_until", [(prompt, options) for prompt in prompts])
    return list(model.generate_until(requests, disable_tqdm=True))


def assert_same(got: list[tuple[float, bool]], want: list[tuple[float, bool]]) -> None:
    np.testing.assert_allclose([pair[0] for pair in got], [pair[0] for pair in want], rtol=0, atol=1e-4)
    assert [pair[1] for pair in got] == [pair[1] for pair in want]


# ---- dense: the harness' own model, over transformers -----------------------------------------------


def test_loglikelihoods_are_those_of_the_harness_own_model(ours: HarnessModel, hf: HFLM) -> None:
    assert_same(likelihoods(ours), likelihoods(hf))


def test_what_greedy_decoding_says_is_greedy(ours: HarnessModel, hf: HFLM) -> None:
    """Byte tokens seldom make text again, so the answer is looked for among contexts."""
    pairs = []
    for first in range(32, 127):
        context = TEXT + chr(first)
        made = ours.llm.generate(context, max_new_tokens=2).token_ids
        text = ours.llm.tokenizer.decode(made)
        if text.strip() == text and ours.llm.tokenizer.encode(text) == made:
            pairs += [(context, text), (context, text[:-1] + "\x7f")]
    got = likelihoods(ours, pairs)
    assert len(pairs) > 2
    assert [greedy for _, greedy in got] == [True, False] * (len(pairs) // 2)
    assert_same(got, likelihoods(hf, pairs))


@pytest.mark.parametrize("max_length", [17, 64])
def test_long_texts_are_cut_as_by_the_harness_own_model(
    folder: Path, ours: HarnessModel, max_length: int, caplog: pytest.LogCaptureFixture
) -> None:
    short, hf = HarnessModel(ours.llm, max_length=max_length), theirs(folder, max_length=max_length)
    assert_same(likelihoods(short), likelihoods(hf))
    assert answers(short, [TEXT], max_gen_toks=9) == answers(hf, [TEXT], max_gen_toks=9)
    caplog.clear()
    answers(short, [TEXT[:50]], max_gen_toks=9)
    lost = 50 + 9 - max_length
    assert [m for m in caplog.messages if "loses" in m] == (
        [f"a text of 50 tokens loses its first {lost}"] if lost > 0 else []
    )


def test_greedy_answers_are_those_of_the_harness_own_model(ours: HarnessModel, hf: HFLM) -> None:
    options = {"max_gen_toks": 24, "do_sample": False}
    prompts = [text for text in CONTEXTS if text]
    whole = answers(ours, prompts, **options)
    assert whole == [answers(hf, [prompt], **options)[0] for prompt in prompts]  # one by one: no padding
    stops = [letter for text in whole for letter in text[4:] if letter.isascii() and letter.isprintable()]
    for until in (stops[0], stops[:2]):
        got = answers(ours, prompts, until=until, **options)
        assert got == [answers(hf, [prompt], until=until, **options)[0] for prompt in prompts]
        assert got != whole
    assert answers(ours, prompts, until=[""], **options) == whole


def test_chats_are_rendered_as_by_the_harness_own_model(ours: HarnessModel, hf: HFLM) -> None:
    chat = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "The answer is "}]
    for add in (True, False):
        assert ours.apply_chat_template(chat, add) == hf.apply_chat_template(chat, add)
    assert ours.apply_chat_template(chat, False).endswith("The answer is ")
    assert ours.chat_template(True) == hf.chat_template(True) == TEMPLATE
    assert ours.tok_encode(BOS + "x") == [256, ord("x") - 33]
    with pytest.raises(ValueError, match="only the default template"):
        ours.chat_template("tools")


def test_a_tokenizer_that_begins_texts_with_bos(tmp_path: Path) -> None:
    path = model_folder(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    tokenizer.save(str(path))
    ours, hf = HarnessModel(str(tmp_path), threads=1), theirs(tmp_path)
    for text in ("x", BOS + "x"):
        assert ours.tok_encode(text) == hf.tok_encode(text) == [256, ord("x") - 33]
    assert_same(likelihoods(ours), likelihoods(hf))
    options = {"max_gen_toks": 12, "do_sample": False}
    assert answers(ours, [BOS + "The sea"], **options) == answers(hf, [BOS + "The sea"], **options)


# ---- pruned ----------------------------------------------------------------------------------------


def test_the_context_is_the_prompt_and_the_continuation_is_generated(pruned: HarnessModel) -> None:
    tokenizer, want = pruned.llm.tokenizer, 0.0
    session = pruned.llm.session(lazyllm.Pruning(STAGES))
    logits = session.forward(tokenizer.encode(TEXT.rstrip()))
    for token in tokenizer.encode(" so"):
        want += logits[token] - np.log(np.exp(logits.astype(np.float64)).sum())
        logits = session.forward([token], generated=True)
    assert likelihoods(pruned, [(TEXT, "so")])[0][0] == pytest.approx(want, abs=1e-5)


def test_continuations_of_one_context_share_its_pass(pruned: HarnessModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, session = [], lazyllm.LLM.session
    monkeypatch.setattr(lazyllm.LLM, "session", lambda *a, **k: runs.append(1) or session(*a, **k))
    choices = [(TEXT, text) for text in [*CONTINUATIONS, *(f" {letter}" for letter in "ABCD")]]
    together = likelihoods(pruned, choices)
    assert len(runs) == 1
    assert together == [likelihoods(pruned, [choice])[0] for choice in choices]


def test_sampled_answers_repeat_by_seed_and_differ_between_requests(ours: HarnessModel) -> None:
    options = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "max_gen_toks": 20}
    first = answers(ours, ["The sea"] * 3, **options)
    assert len(set(first)) == 3
    assert answers(ours, ["The sea"] * 3, **options) == first
    assert answers(HarnessModel(ours.llm, seed=100), ["The sea"] * 3, **options) != first


def test_settings_and_what_results_say_of_them(ours: HarnessModel) -> None:
    for given, setting in ((json.dumps(STAGES), lazyllm.Pruning(STAGES)), (PAPER, PAPER)):
        model = HarnessModel(ours.llm, given)
        assert model.pruning == setting
        assert model.get_model_info()["pruning"] == setting.to_json()
        assert len(likelihoods(model, [(TEXT, " so")])) == 1


def test_no_bar_where_none_is_wanted(
    pruned: HarnessModel, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LONG_PROMPT", 100)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0.0)
    answers(pruned, [TEXT * 4], max_gen_toks=2)
    likelihoods(pruned, [(TEXT * 4, TEXT)])
    assert capfd.readouterr() == ("", "")


# ---- through the harness ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks in a folder: answers generated, and one of three choices."""
    place = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"{TEXT} {number}?", "choices": [" calm", " ship", " day"], "answer": number % 3}
        for number in range(4)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(place / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    generated = {
        "task": "tiny_generated",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    choice = {
        "task": "tiny_choice",
        "output_type": "multiple_choice",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}],
    }
    for task in (generated, choice):
        (place / f"{task['task']}.yaml").write_text(json.dumps(shared | task))  # JSON is YAML
    return place


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setenv("LAZYLLM_PROGRESS", "0")


def evaluated(tasks: Path, model: Any, chat: bool = False, **options: Any) -> dict[str, Any]:
    made: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=["tiny_generated", "tiny_choice"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        apply_chat_template=chat,
        **options,
    )
    return made


def responses(made: dict[str, Any], task: str) -> list[Any]:
    return [sample["filtered_resps"] for sample in made["samples"][task]]


@pytest.mark.parametrize("chat", [False, True])
def test_whole_evaluations(folder: Path, tasks: Path, hf: HFLM, pruned: HarnessModel, chat: bool) -> None:
    arguments = {"pretrained": str(folder), "threads": 1}
    dense = evaluated(tasks, "lazyllm", chat, model_args=arguments)
    want = evaluated(tasks, hf, chat)
    less = evaluated(tasks, "lazyllm", chat, model_args=arguments | {"pruning": STAGES})
    again = evaluated(tasks, pruned, chat)
    assert responses(dense, "tiny_generated") == responses(want, "tiny_generated")
    assert responses(less, "tiny_generated") != responses(want, "tiny_generated")
    for got, right in zip(responses(dense, "tiny_choice"), responses(want, "tiny_choice"), strict=True):
        assert_same(got, right)
    assert dense["results"]["tiny_choice"]["acc,none"] == want["results"]["tiny_choice"]["acc,none"]
    for task in ("tiny_generated", "tiny_choice"):
        assert responses(less, task) == responses(again, task)
    assert responses(less, "tiny_choice") != responses(dense, "tiny_choice")
    assert lazyllm.parse_method(less["config"]["pruning"]) == lazyllm.Pruning(STAGES)
    assert lazyllm.parse_method(dense["config"]["pruning"]) == lazyllm.Pruning()


LOCAL_TASKS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "longbench2_detective": (
        "longbench2/detective.yaml",
        "train",
        {"dataset_name": None},
        {"context": TEXT, "question": "Who?", "choices": ["cook", "maid", "guest", "cat"], "answer": 1},
    ),
    "babilong_qa1": (
        "babilong/babilong_qa1.yaml",
        "qa1",
        {"custom_dataset": None},
        {"input": TEXT, "question": "Where is Mary?", "target": "kitchen"},
    ),
    "infinitebench_passkey": (
        "infinitebench/infinitebench_passkey.yaml",
        "passkey",
        {},
        {"id": 0, "context": TEXT, "input": "The key?", "answer": ["71432"], "options": []},
    ),
}
"""By task: the harness' file, its split, the line that docs/lm-eval.md adds to it, and a row of the data."""


@pytest.mark.parametrize("task", LOCAL_TASKS)
def test_tasks_of_the_harness_on_local_files(task: str, pruned: HarnessModel, tmp_path: Path) -> None:
    file, split, lines, row = LOCAL_TASKS[task]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = {"data_files": {split: str(tmp_path / "rows.jsonl")}}
    lines = {"include": str(Path(lm_eval.__file__).parent / "tasks" / file), "dataset_path": "json"} | lines
    (tmp_path / "task.yaml").write_text(json.dumps({"dataset_kwargs": data, **lines}))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(model=pruned, tasks=[task], task_manager=manager, bootstrap_iters=0)
    (sample,) = results["samples"][task]
    assert sample["doc"] == row
    prompts = [arguments[0] for arguments in sample["arguments"]]
    assert len(prompts) == len(row.get("choices", [""]))
    assert all(TEXT.strip() in prompt for prompt in prompts)


def test_the_command_of_the_readme_needs_no_gpu(folder: Path, tasks: Path, tmp_path: Path) -> None:
    readme = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^lazyllm (lm-eval --model lazyllm .*)$", readme, re.M)
    line = line.partition(" #")[0].replace("DIR", str(folder)).replace("gsm8k", "tiny_choice")
    before = list(sys.argv)
    arguments = [*shlex.split(line), "--include_path", str(tasks), "--output_path", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert sys.argv == before
    (written,) = tmp_path.rglob("results_*.json")
    found = json.loads(written.read_text())
    assert lazyllm.parse_method(found["config"]["pruning"]) == lazyllm.Speedup(2.0)
    assert found["config"]["model_device"] == "cpu"
    assert "acc,none" in found["results"]["tiny_choice"]


def test_a_device_that_is_given_is_used() -> None:
    assert default_device(["--model", "lazyllm", "--tasks", "x"]) == ["--device", "auto"]
    for given in (["--device", "cuda:0"], ["--device=cpu"], ["--config", "run.yaml"]):
        assert default_device(["--model", "lazyllm", *given]) == []
    assert default_device(["--model", "hf"]) == default_device(["ls", "tasks"]) == []


def test_what_cannot_be_done_is_refused(ours: HarnessModel) -> None:
    with pytest.raises(ValueError, match="every token of a text, so there is no prompt to prune"):
        ours.loglikelihood_rolling(asked("loglikelihood_rolling", [(TEXT,)]))
    with pytest.raises(ValueError, match="lazyllm longbench runs it"):
        HarnessModel(ours.llm, "compress:ratio=0.5")
    with pytest.raises(ValueError, match="out of reach"):
        HarnessModel(ours.llm, {"50": 0.5})
    with pytest.raises(ValueError, match="a speedup of 7 is out of reach"):
        HarnessModel(ours.llm, 7)
    with pytest.raises(ValueError, match="max_length must be"):
        HarnessModel(ours.llm, max_length=601)
    with pytest.raises(ValueError, match="max_gen_toks must be below max_length"):
        answers(ours, ["x"], max_gen_toks=600)
    with pytest.raises(ValueError, match="no field 'num_beams'; its fields are temperature"):
        answers(ours, ["x"], num_beams=4)
    assert answers(ours, ["x"], num_beams=1) == answers(ours, ["x"])
    with pytest.raises(ValueError, match="a continuation has 8 tokens; it must have 1 to 7"):
        likelihoods(HarnessModel(ours.llm, max_length=7), [("x", "12345678")])


def test_a_checkpoint_without_end_token(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    model = HarnessModel(str(tmp_path))
    with pytest.raises(ValueError, match="names no end token"):
        likelihoods(model, [("", "x")])
    assert model.chat_template(True) is None
    assert EOS not in answers(model, ["x"])[0]
