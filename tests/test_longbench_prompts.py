"""LongBench's items and prompts: the forms of the data, templates, cuts, wrappers, stops, and refusals."""

import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from families import config_of, family_config
from folders import BOS, EOS, benchmark_item, write_tokenizer

from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.evaluation.chats import chat_wrapper, wrapped_ids
from lazyllm.evaluation.longbench.datasets import DATA_SETS
from lazyllm.evaluation.longbench.items import available, read
from lazyllm.evaluation.longbench.tasks import LongBench, Templates, find_templates, make_prompt, official, prompt_ids
from lazyllm.evaluation.options import DataOptions
from lazyllm.evaluation.tasks import ItemPrompt

QUESTION = "Text: {context}\n\nQuestion: {input} \nAnswer:"
NAMES = [name for name in DATA_SETS if not name.endswith("_e")]
PROMPTS = dict.fromkeys(NAMES, QUESTION) | {"lcc": "{context}next {{line}}:\n"}
LENGTHS = {name: 8 + rank for rank, name in enumerate(NAMES)}
TEMPLATES = Templates("here", PROMPTS, LENGTHS)
Named = Callable[..., Tokenizer]
HUMAN = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the human's questions.\n\n ### Human: "
)


def item(name: str = "hotpotqa", number: int = 0, **fields: Any) -> dict[str, Any]:
    own = {
        "input": "Who rang the bells?",
        "context": f"Passage {number}: the bells of {{Lindau}}\u2028 were cast in 17{number:02}. 钟 🔔 ",
        "answers": ["the sexton", "he"],
        "length": 100 * number,
    }
    return {**benchmark_item(name, number), **own, **fields}


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)


def write_items(folder: Path, name: str = "hotpotqa", count: int = 3) -> list[dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [item(name.removesuffix("_e"), number) for number in range(count)]
    (folder / f"{name}.jsonl").write_text(jsonl(rows), encoding="utf-8")
    return rows


def write_templates(folder: Path, prompts: Any = PROMPTS, lengths: Any = LENGTHS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset2maxlen.json").write_text(json.dumps(lengths), encoding="utf-8")
    (folder / "dataset2prompt.json").write_text(json.dumps(prompts), encoding="utf-8")
    return folder / "dataset2prompt.json"


def write_zip(path: Path, members: Mapping[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(scope="session")
def backend(demo_model: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    return Backend.from_file(str(demo_model / "tokenizer.json"))


@pytest.fixture
def named(tmp_path: Path) -> Named:
    """Makes a tokenizer of bytes, which puts <s> first, in a folder of a given name."""

    def make(name: str = "some-model", chat_template: bool = True) -> Tokenizer:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        write_tokenizer(folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"add_bos_token": True}
        if not chat_template:
            del settings["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        config = config_of(family_config("LlamaForCausalLM", vocab_size=300))
        return Tokenizer.from_folder(folder, config)

    return make


# ---- where items come from -----------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["", "data"])
def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    """Its files may have blank lines and any line ends."""
    rows = write_items(tmp_path / inner)
    write_items(tmp_path / inner, "trec", 1)
    (tmp_path / inner / "notes.jsonl").write_text("these are no items")
    assert tuple(available(tmp_path)) == tuple(available(str(tmp_path))) == ("hotpotqa", "trec")
    monkeypatch.chdir(tmp_path)
    assert read(tmp_path, "hotpotqa") == read(".", "hotpotqa") == rows
    text = jsonl(rows).replace("\n", "\r\n\r\n").removesuffix("\r\n\r\n")
    (tmp_path / inner / "hotpotqa.jsonl").write_bytes(text.encode())
    assert read(tmp_path, "hotpotqa") == rows
    either = [item("hotpotqa", 0), item("hotpotqa_e", 1)]  # an item of LongBench-E may name either set
    (tmp_path / inner / "hotpotqa_e.jsonl").write_text(jsonl(either), encoding="utf-8")
    assert read(tmp_path, "hotpotqa_e") == either


@pytest.mark.parametrize("inner", ["", "data/", "LongBench-main/LongBench/data/"])
def test_zip(tmp_path: Path, inner: str) -> None:
    rows = [item(number=number) for number in range(3)]
    members = {
        f"{inner}hotpotqa.jsonl": jsonl(rows),
        f"{inner}hotpotqa_e.jsonl": jsonl(rows[:1]),
        f"__MACOSX/{inner}hotpotqa.jsonl": "no item",
        f"{inner}._hotpotqa.jsonl": "no item",
    }
    path = write_zip(tmp_path / "data.zip", members)
    assert tuple(available(path)) == ("hotpotqa", "hotpotqa_e")
    assert read(path, "hotpotqa") == rows
    assert read(path, "hotpotqa_e") == rows[:1]


def test_zip_refusals(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "two.zip", {"a/trec.jsonl": "", "b/trec.jsonl": ""})
    with pytest.raises(ValueError, match=r"two.zip holds trec.jsonl more than once: a/trec.*, b/trec.*expec"):
        available(path)
    whole = write_zip(tmp_path / "data.zip", {"data/trec.jsonl": jsonl([item("trec", 0, input="")])})
    broken = tmp_path / "broken.zip"
    broken.write_bytes(whole.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"broken.zip is damaged, encrypted or no zip file: "):
        available(broken)
    contents = bytearray(whole.read_bytes())
    contents[45] ^= 0xFF  # in the compressed text
    broken.write_bytes(contents)
    with pytest.raises(ValueError, match=r"broken.zip/data/trec.jsonl is damaged, encrypted or no zip file"):
        read(broken, "trec")
    path = write_zip(whole, {"data/trec.jsonl": jsonl([item("trec", answers=[])])})
    with pytest.raises(ValueError, match=r"data.zip/data/trec.jsonl, line 1: answers is \[\]; expected a lis"):
        read(path, "trec")


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub as hub

    path = write_zip(tmp_path / "data.zip", {"data/hotpotqa.jsonl": jsonl([item()])})
    asked: list[Any] = []

    def download(repository: str, name: str, repo_type: str) -> str:
        asked.append((repository, name, repo_type))
        return str(path)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert read("hub:THUDM/LongBench", "hotpotqa") == [item()]
    assert set(asked) == {("THUDM/LongBench", "data.zip", "dataset")}

    def fail(*_: Any, **__: Any) -> str:
        raise RuntimeError("no network")

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    with pytest.raises(OSError, match=r"data.zip of hub:THUDM/LongBench could not be fetched: no network"):
        available("hub:THUDM/LongBench")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"needs the package huggingface_hub: pip install"):
        available("hub:THUDM/LongBench")


def test_data_refusals(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("")
    (tmp_path / "none").mkdir()
    write_items(tmp_path / "data", "dureader")
    available(tmp_path / "data", "dureader")
    for data, names, error, message in (
        ("nowhere", ["trec"], FileNotFoundError, "nowhere does not exist; expected a folder of NAME.jsonl"),
        ("items.csv", ["trec"], ValueError, "items.csv is a file of an unknown kind; expected a folder"),
        ("none", ["trec"], FileNotFoundError, "lacks trec; it holds no data set: expected a folder"),
        ("data", ["trec", "dureader", "lcc"], FileNotFoundError, "lacks trec, lcc; it holds dureader$"),
        ("data", ["dureade"], ValueError, "there is no LongBench data set 'dureade'; did you mean dureader"),
        ("data", [3], TypeError, "the name of a LongBench data set must be a string, not 3"),
        ("data", ["!"], ValueError, "no LongBench data set '!'; expected one of narrativeqa, qasper, "),
        (
            "data",
            None,
            FileNotFoundError,
            "no file NAME.jsonl of an English data set of LongBench; it holds dureader: name",
        ),
    ):
        with pytest.raises(error, match=message):
            LongBench(DataOptions(data=tmp_path / data, datasets=names))


A_STRING = "expected a string$"
A_LIST = r"expected a list of at least one string"


def test_rows(tmp_path: Path) -> None:
    for row, message in (
        *(
            ({name: value for name, value in item().items() if name != field}, f"{field} is missing; exp")
            for field in item()
            if field != "language"
        ),
        (item(input=None), f"line 2: input is None; {A_STRING}"),
        (item(context=["a"]), rf"context is \['a'\]; {A_STRING}"),
        (item(answers="a"), f"answers is 'a'; {A_LIST}$"),
        (item(answers=[]), rf"answers is \[\]; {A_LIST}$"),
        (item(answers=["a", 3]), rf"answers is \['a', 3\]; {A_LIST}$"),
        (item(length=-1), "length is -1; expected a whole number from 0$"),
        (item(length=True), "length is True; expected a whole number from 0$"),
        (item(dataset="trec"), "dataset is 'trec'; expected 'hotpotqa'$"),
        (item(all_classes=[]), rf"all_classes is \[\]; {A_LIST}, or null$"),
        (item(all_classes={}), rf"all_classes is {{}}; {A_LIST}, or null$"),
        (item(_id=""), "_id is ''; expected a string that is not empty$"),
        (item(_id=7), "_id is 7; expected a string that is not empty$"),
        (item(number=0), "_id is 'hotpotqa-0'; expected one that no earlier item has$"),
        (b'{"input": "cut o', "line 1 is not JSON: "),
        (b"[" * 100_000, "line 1 is not JSON: "),
        (b'"\xff"', "line 1 is not JSON: .*utf-8"),
        (b"\n[1, 2]\n", "line 2 holds a list; expected a JSON object"),
        (b"\n", r"is empty; expected items of hotpotqa"),
    ):
        line = row if isinstance(row, bytes) else (jsonl([item()]) + json.dumps(row)).encode()
        (tmp_path / "hotpotqa.jsonl").write_bytes(line)
        with pytest.raises(ValueError, match=rf"hotpotqa.jsonl.*{message}"):
            read(tmp_path, "hotpotqa")


# ---- templates -----------------------------------------------------------------------------------


def test_templates_are_found_in_the_data_folder_only(tmp_path: Path) -> None:
    data = tmp_path / "LongBench"
    rows = write_items(data / "data")
    write_templates(tmp_path)
    write_templates(tmp_path / "config")
    for folder in (data / "data", data, data / "data" / "hotpotqa.jsonl"):
        assert find_templates(folder) is official()
    assert find_templates(write_zip(tmp_path / "data.zip", {})) is official()  # not what lies beside the zip
    for place in (data / "config", data):
        path = write_templates(place)
        assert find_templates(data) == Templates(str(path), PROMPTS, LENGTHS)
    assert read(data, "hotpotqa") == rows


def test_given_templates(tmp_path: Path) -> None:
    path = write_templates(tmp_path / "mine").rename(tmp_path / "mine" / "own.json")
    write_templates(tmp_path / "data", {}, {})
    assert find_templates(tmp_path / "data", path).source == str(path)
    assert find_templates(tmp_path / "data", path).lengths == LENGTHS
    path.with_name("dataset2maxlen.json").unlink()
    assert find_templates(prompts=path).prompts == PROMPTS
    assert find_templates(prompts=path).lengths == official().lengths
    with pytest.raises(FileNotFoundError, match=r"none.json is missing; expected a file such as dataset2pro"):
        find_templates(prompts=tmp_path / "none.json")


def test_the_official_files_are_those_of_the_benchmark() -> None:
    """SHA-256 of LongBench/config in github.com/THUDM/LongBench at commit 2e00731."""
    assert find_templates() is official()
    files = {
        "dataset2prompt.json": "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30",
        "dataset2maxlen.json": "72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022",
        "LICENSE": "bf7f05f274d65931bdf14f060b6855f1c359b8424eb74fd3091d25de89d700c3",
    }
    folder = Path(official().source).parent
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} == files
    assert len(NAMES) == 21
    assert sorted(official().prompts) == sorted(official().lengths) == sorted(NAMES)
    assert {official().verdict(name) for name in DATA_SETS} == {"official"}
    assert all(1 <= official().max_new_tokens(name) <= 512 for name in DATA_SETS)


WRONG_TEMPLATES = [
    *(("{question}", "'{question}'"), ("{}", "'{}'"), ("{input.__class__}", "'{input.__class__}'")),
    *(("{context!r}", "'{context!r}'"), ("{context:>{input}}", "'{context:>}'"), ("{input} {", "'{'")),
    *(("{{input}", "'}'"), (["{input}"], r"\['{input}'\]"), ([], r"\[\]")),
]


def test_files_that_are_no_templates(tmp_path: Path) -> None:
    refused: list[tuple[Any, Any, str]] = [([], {}, "prompt.json holds a list; expected a JSON object")]
    for template, wrong in WRONG_TEMPLATES:
        message = f"dataset2prompt.json: qmsum has {wrong}; expected a template with the "
        refused.append(({"qmsum": template}, {}, message))
    for length in (0, -3, True, 1.0, "64", None, 10**30):
        message = "dataset2maxlen.json: qmsum must be (a whole number|from 1 to)"
        refused.append(({}, {"qmsum": length}, message))
    for prompts, lengths, message in refused:
        write_templates(tmp_path, prompts, lengths)
        with pytest.raises((TypeError, ValueError), match=message):
            find_templates(tmp_path)


def test_templates_by_name() -> None:
    few = Templates("few.json", {"qasper": "{input}"}, {})
    for call in (few.template, few.verdict):
        with pytest.raises(ValueError, match=r"few.json has no template for trec; expected one as in Long"):
            call("trec")
    with pytest.raises(ValueError, match=r"dataset2maxlen.json beside few.json has no length for qasper"):
        few.max_new_tokens("qasper")
    assert TEMPLATES.prompt(item("qasper_e")) == TEMPLATES.prompt(item("qasper"))
    assert TEMPLATES.max_new_tokens("qasper_e") == LENGTHS["qasper"]
    changed = Templates("changed", official().prompts | {"qasper": official().prompts["qasper"] + " "}, LENGTHS)
    assert [name for name in DATA_SETS if changed.verdict(name) != "official"] == ["qasper", "qasper_e"]


# ---- prompts -------------------------------------------------------------------------------------


def test_cut_on_both_sides_of_the_limit(demo_tokenizer: Tokenizer, backend: Any) -> None:
    clauses = (f"Clause {n} of the {n * n}th: naïve 钟声🔔 <|im_end|>\n" for n in range(40))
    asked = item(context="".join(clauses))
    text = QUESTION.format(**asked)
    whole = backend.encode(text).ids
    length = len(whole)
    for max_length in (2, 3, 64, 65, length - 2, length - 1, length, length + 1):
        prompt = make_prompt(demo_tokenizer, asked, max_length, "none", TEMPLATES)
        assert prompt.cut == (max_length < length)
        half = max_length // 2
        left = backend.encode(backend.decode(whole[:half]) + backend.decode(whole[length - half :])).ids
        assert prompt.ids == (left if prompt.cut else whole)
        assert prompt.ids == prompt_ids(demo_tokenizer, asked, max_length, wrapper="none", templates=TEMPLATES)
    cut = make_prompt(demo_tokenizer, asked, length - 1, "none", TEMPLATES)
    assert 2 not in cut.ids  # <|im_end|>, skipped


def test_the_context_is_shortened_after_the_cut(named: Named) -> None:
    tokenizer, seen = named(), []

    def shorten(text: str) -> str:
        seen.append(text)
        return f"<{len(text)}>"

    def shortened(max_length: int, **fields: Any) -> str:
        prompt = make_prompt(tokenizer, item(**fields), max_length, "none", TEMPLATES, shorten)
        assert prompt.cut == (max_length < 400)
        return tokenizer.decode(prompt.ids)

    context, end = "0123456789" * 40, "\n\nQuestion: Who rang the bells? \nAnswer:"
    assert shortened(4000, context=context) == f"Text: <400>{end}"
    assert shortened(200, context=context) == f"Text: <{200 - 1 - 6 - len(end)}>{end}"  # one token is <s>
    assert seen == [context, "0123456789" * 9 + "012" + context[-(100 - len(end)) :]]
    assert shortened(30, context=context) == "Text: <8>bells? \nAnswer:"  # the question's beginning is cut
    assert shortened(4000, input="{context}") == "Text: <57>\n\nQuestion: {context} \nAnswer:"


def test_prompts_are_official_unless_templates_are_given(named: Named) -> None:
    tokenizer, asked = named(), item("lcc", 3)
    own = f"{asked['context']}next {{line}}:\n"
    for templates, text in ((None, official().prompt(asked)), (TEMPLATES, own)):
        assert tokenizer.decode(prompt_ids(tokenizer, asked, wrapper="none", templates=templates)) == text


# ---- wrappers ------------------------------------------------------------------------------------

TEXT = QUESTION.format(**item())
WRAPPED = {
    "none": f"{BOS}{TEXT}",
    "llama-2": f"{BOS}[INST]{TEXT}[/INST]",
    "xgen": f"{BOS}{HUMAN}{TEXT}\n###",
    "template": f"{BOS}<turn>user\n{TEXT}{EOS}\n<turn>assistant\n",
}


@pytest.mark.parametrize("chat", WRAPPED)
def test_wrappers(named: Named, chat: Any) -> None:
    tokenizer = named()
    prompt = make_prompt(tokenizer, item(), wrapper=chat, templates=TEMPLATES)
    assert prompt == ItemPrompt(prompt.ids, False, chat)
    assert "".join(tokenizer.offsets(prompt.ids)) == WRAPPED[chat]
    cut = make_prompt(tokenizer, item(), 21, chat, TEMPLATES)
    assert cut.cut
    left = WRAPPED[chat].replace(TEXT, TEXT[:9] + TEXT[-10:])  # the wrapper comes after the cut
    assert "".join(tokenizer.offsets(cut.ids)) == left
    begun = wrapped_ids(tokenizer, TEXT, chat, " It is")  # the answer begins outside the wrapper
    header = " Assistant:" if chat == "xgen" else ""
    assert "".join(tokenizer.offsets(begun)) == f"{WRAPPED[chat]}{header} It is"


def test_sets_without_wrapper(named: Named) -> None:
    tokenizer, bare = named("Llama-2-7b-chat-hf"), set()
    for name in NAMES:
        prompt = make_prompt(tokenizer, item(name), templates=TEMPLATES)
        if prompt.wrapper == "none":
            bare.add(name)
            assert prompt.ids == tokenizer.encode(TEMPLATES.prompt(item(name)))
    assert bare == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def test_wrapper_of_a_checkpoint(named: Named) -> None:
    for name, chat_template, wrapper in (
        ("Llama-2-7b-chat-hf", True, "llama-2"),
        ("models--meta-llama--Llama-2-13b-chat-hf/snapshots/0a1b2c", True, "llama-2"),
        ("Llama-2-7b-hf", False, "none"),
        ("Llama-20b-chat", True, "template"),
        ("TinyLlama-1.1B-Chat-v1.0", True, "template"),
        ("xgen-7b-8k-inst", False, "xgen"),
        ("xgen-7b-8k-base", False, "none"),
        ("Mistral-7B-v0.1", False, "none"),
    ):
        tokenizer = named(name, chat_template)
        assert chat_wrapper(tokenizer) == wrapper, name
        assert chat_wrapper(tokenizer, "none") == "none"


def test_prompt_refusals(named: Named) -> None:
    tokenizer = named("plain", chat_template=False)
    for asked, options, error, message in (
        ({}, {"wrapper": "llama"}, ValueError, "must be auto, none, llama-2, xgen or template, not 'lla"),
        ({}, {"wrapper": "template"}, ValueError, "wrapper is 'template', and .*plain has no chat template"),
        ({}, {"max_length": 1}, ValueError, "max_length must be from 2 to .*, not 1"),
        ({}, {"max_length": 3500.0}, TypeError, "max_length must be a whole number, not 3500.0"),
        ({"dataset": None}, {}, ValueError, "item: dataset is None; expected a string"),
        ({"context": 3}, {}, ValueError, "item: context is 3; expected a string"),
        ({"dataset": "squad"}, {}, ValueError, "there is no LongBench data set 'squad'"),
    ):
        with pytest.raises(error, match=message):
            prompt_ids(tokenizer, item() | asked, **options)


def test_the_beginning_that_xgen_writes_itself_is_not_scored(named: Named) -> None:
    llm: Any = SimpleNamespace(tokenizer=named())
    tasks, answer = LongBench.__new__(LongBench), " Assistant: Lindau\nAssistant: it was\n"
    for tasks.wrapper in WRAPPED:  # type: ignore[assignment]
        assert tasks.prediction(llm, answer) == (" Lindau\n it was" if tasks.wrapper == "xgen" else answer)


def test_stops(demo_tokenizer: Tokenizer, backend: Any) -> None:
    llm: Any = SimpleNamespace(tokenizer=demo_tokenizer)
    ends, newline = frozenset(demo_tokenizer.eos_token_ids), backend.encode("\n").ids[-1]
    both = ends | {newline}
    tasks = LongBench.__new__(LongBench)
    tasks._templates, tasks._options = official(), DataOptions()
    for name in DATA_SETS:
        request = tasks.request(llm, name)
        line = name in ("samsum", "samsum_e")
        assert (request.stop_token_ids, request.never_first) == ((both, both) if line else (ends, frozenset()))
        assert request.max_new_tokens == official().max_new_tokens(name)
