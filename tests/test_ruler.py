"""Generated long-context tasks: the same everywhere, as long as asked, answers exactly where promised."""

import json
import re
import sys
from collections import Counter
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.evaluation.generated import material, ruler
from lazyllm.evaluation.generated.kinds import Encode, strings_found
from lazyllm.evaluation.generated.material import Draws, Haystack, distinct, names, vocabulary
from lazyllm.evaluation.generated.tasks import (
    OF_RULER,
    ONE_NEEDLE,
    TASKS,
    generate,
    generated_items,
    needles_found,
    prompt_encoder,
)
from lazyllm.evaluation.longbench.items import checked_item
from lazyllm.evaluation.options import NiahOptions, RulerOptions
from lazyllm.pictures.panels import CHARACTERS_PER_INCH, panel_title, plot_needle_map

NEEDLE = re.compile(r"(?:The|One) secret code of (\S+) is (\S+)\.")
NEEDLES = [kind.name for kind in OF_RULER if kind.category == "Retrieval"]
IN_TEXT = [name for name in NEEDLES if name not in ("niah_multikey_2", "niah_multikey_3")]


def pieces(text: str, answer_prefix: str = "") -> list[int]:
    """Words and marks in place of tokens, without a chat template."""
    return [len(piece) for piece in re.findall(r"\w+|[^\w\s]", text + answer_prefix)]


each_task = pytest.mark.parametrize("task", TASKS)


def length_of(item: dict[str, Any], encode: Encode) -> int:
    """Tokens of the prompt and of the longest answer."""
    task = TASKS[item["dataset"]]
    return len(encode(task.template.format(**item), item["answer_prefix"])) + task.max_new_tokens


DIGESTS = {
    "niah_single_1": "ed19314e5fbcab9e",
    "niah_single_2": "90323cb5ccc2c86f",
    "niah_single_3": "bc947afd64ca2526",
    "niah_multikey_1": "91f70ca19edda88d",
    "niah_multikey_2": "b9a6943c36e6bf99",
    "niah_multikey_3": "acea9f6d2293e1ec",
    "niah_multivalue": "289468fbfa512249",
    "niah_multiquery": "76331c2aedf5fa46",
    "vt": "7559f2b7837a027f",
    "cwe": "0de5ccc08e2c8a7d",
    "fwe": "14a6450915593df9",
    "niah_turns": "0236742e75e9fc83",
    "niah_alone": "297efbdf6fa2ddea",
    "quote_lines": "bbbdac130e3c630e",
    "quote_paragraph": "1a6ca19775125207",
    "quote_function": "aff43be5fdb85739",
}


@each_task
def test_items_have_the_benchmarks_fields_the_same_of_a_seed_and_others_of_others(task: str) -> None:
    items = generate(task, pieces, 1500, count=2, seed=7)
    if TASKS[task].category == "Aggregation":  # a list longer than the words goes on with names
        items += generate(task, pieces, 20_000, count=1, seed=7)
    lines = "\n".join(json.dumps(item) for item in items)
    assert sha256(lines.encode()).hexdigest()[:16] == DIGESTS[task]
    assert generate(task, pieces, 1500, count=1, seed=7) == items[:1]  # whatever their number
    items = [*generate(task, pieces, 1000, 2, 0), *generate(task, pieces, 1000, 2, 1)]
    items += generate(task, pieces, 1100, 2, 0)
    assert len({item["context"] for item in items}) == len(items)
    assert len({item["_id"] for item in items}) == len(items)
    for item in items:
        assert checked_item("here", item, task) is item
        around = TASKS[task].template.format(**{**item, "context": ""})
        assert strings_found(item["context"], item["answers"]) == {"score": 1}
        assert strings_found(around, item["answers"]) == {"score": 0}
        assert len({*item["answers"]}) == len(item["answers"])
        assert (item["depth"] is None) == (task not in ONE_NEEDLE)
        if TASKS[task].category == "Aggregation":
            counted = Counter(re.findall("[a-z]+", item["context"])).most_common(len(item["answers"]))
            assert {word for word, _ in counted} == {*item["answers"]}


@each_task
def test_prompt_template_and_answer_fill_the_length(task: str, demo_tokenizer: Tokenizer) -> None:
    of_model = prompt_encoder(demo_tokenizer, "auto")
    for encode, lengths in ((of_model, (900, 922, 6000)), (pieces, (700, 733, 3000))):
        for length in lengths:
            for item in generate(task, encode, length, count=2, seed=0):
                least = 0.9 if TASKS[task].whole_parts else 0.97
                assert least * length <= length_of(item, encode) <= length
    with pytest.raises(ValueError, match=rf"length is 20; item 0 of {task} needs at least \d+ tokens"):
        generate(task, pieces, 20, count=1, seed=0)


# ---- answers where promised ----------------------------------------------------------------------


def test_names_come_once_and_run_out_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*vocabulary("adjective"), *vocabulary("noun")]
    assert len({*words}) == len(words) > 1700
    assert not [(word, other) for word in words for other in words if word != other and word in other]
    few = {"adjective": ("calm", "red"), "noun": ("moon", "star", "sun")}
    monkeypatch.setattr(material, "vocabulary", few.get)
    pairs = [f"{adjective}-{noun}" for adjective in few["adjective"] for noun in few["noun"]]
    assert sorted(islice(names(Draws("a")), 6)) == pairs
    with pytest.raises(ValueError, match="more than the 6 names there are; use a smaller length"):
        generate("niah_multikey_2", pieces, 1000, count=1, seed=0)


@pytest.mark.parametrize("task", ONE_NEEDLE)
def test_the_needle_is_as_deep_as_asked(task: str) -> None:
    for depth in (0, 12.5, 50, 81, 100, None):
        (item,) = generate(task, pieces, 2000, count=1, seed=0, depth=depth)
        assert item["_id"] == f"{task}-2000-depth{item['depth']}-seed0-0"
        context = item["context"]
        (needle,) = (match[0] for match in NEEDLE.finditer(context) if match[2] == item["answers"][0])
        before, after = context.split(needle)
        if task in IN_TEXT:
            assert depth != 0 or not before
            assert depth != 100 or not after
        else:  # the text is needles, with noise at its end
            before, after = ("".join(match[0] for match in NEEDLE.finditer(part)) for part in (before, after))
        words, rest = len(before.split()), len(after.split())
        assert 100 * words / (words + rest) == pytest.approx(item["depth"], abs=1)
        assert item["depth"] == depth or depth is None


# ---- the text around -----------------------------------------------------------------------------


def test_text_is_repeated_and_cut_to_so_many_words() -> None:
    text = Haystack("One, two, three. Four five.")
    assert text.first(2) == ["One, two."]
    assert text.first(5) == ["One, two, three.", "Four five."]
    assert text.first(6, start=1) == ["Four five.", "One, two, three.", "Four."]
    assert text.around([(60, "HERE."), (0, "THERE.")], 5, 0) == "THERE. One, two, three. HERE. Four five."
    assert [*distinct(["six", "Two", "six", "ten"], text)] == ["six", "ten"]  # what a text holds is no needle


def test_a_text_that_cannot_be_cut_to_the_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruler, "prose", lambda: Haystack("a-" * 300 + "b. Short."))
    with pytest.raises(ValueError, match=r"of niah_single_2 can only have \d+ tokens or more than"):
        generate("niah_single_2", pieces, 9628, count=1, seed=0)


# ---- options -------------------------------------------------------------------------------------


def test_bad_input_is_refused_by_name() -> None:
    for bad, error, words in (
        ({"task": "niah_singel_1"}, ValueError, "no generated task 'niah_singel_1'; did you mean niah_sin"),
        ({"length": 0}, ValueError, "length must be from 1 to .*, not 0"),
        ({"count": 0}, ValueError, "count must be from 1"),
        ({"seed": -1}, ValueError, "seed must be from 0 to .*, not -1"),
        ({"depth": 101}, ValueError, "depth must be from 0 to 100 percent, not 101"),
        ({"depth": "50"}, TypeError, "depth must be a number, not '50'"),
    ):
        options = {"task": "niah_single_1", "encode": pieces, "length": 500, "count": 1, "seed": 0, **bad}
        with pytest.raises(error, match=words):
            generate(**options)
    for lists, words in (({"lengths": []}, "lengths must be"), ({"depths": [10, 10.0]}, "depths must be")):
        with pytest.raises(ValueError, match=f"{words} different numbers, at least one"):
            generated_items(pieces, NiahOptions(**{"lengths": [500], **lists}))


def test_numbers_of_numpy_are_numbers() -> None:
    plain = generate("niah_single_1", pieces, 500, count=1, seed=2, depth=50)
    numbers = np.int64(500), np.int32(1), np.uint8(2)
    for depth in (np.int64(50), np.float32(50)):
        assert json.dumps(plain) == json.dumps(generate("niah_single_1", pieces, *numbers, depth=depth))


def test_without_tasks_rulers_own_run() -> None:
    items = generated_items(pieces, RulerOptions(lengths=[700], count=1))
    assert [*items] == [f"{kind.name}@700" for kind in OF_RULER]


def test_string_match_by_hand() -> None:
    for prediction, answers, score in (
        ("It is 123.", ["123"], 1.0),
        ("It is 12 3.", ["123"], 0.0),
        ("abc DEF", ["ABC", "def", "ghi", "jkl"], 0.5),
        ("onetwo", ["one", "two"], 1.0),
        ("", ["one"], 0.0),
    ):
        assert strings_found(prediction, answers) == {"score": score}


# ---- the grid and its picture --------------------------------------------------------------------


def test_a_grid_has_each_length_and_depth_in_noise() -> None:
    grid = generated_items(pieces, NiahOptions(lengths=[400, 800], depths=[0, 50, 100], count=2))
    assert [*grid] == ["niah_single_1@400", "niah_single_1@800"]
    for length, items in zip((400, 800), grid.values(), strict=True):
        places = [(depth, f"{depth}/{number}") for depth in (0, 50, 100) for number in range(2)]
        assert [(item["depth"], item["_id"]) for item in items] == places
        assert {item["length"] for item in items} == {length}
        assert len({item["answers"][0] for item in items}) == 2
        assert all("road" in item["context"] for item in items)


def test_the_picture_holds_the_means(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import matplotlib

    rows = [
        {"dataset": f"niah_single_1@{length}", "item": item, "score": score, "setting": setting}
        for length, item, score, setting in (
            (1024, "0/0", 1.0, "dense"),
            (1024, "0/1", 0.5, "dense"),
            (2048, "50/0", 0.25, "dense"),
            (2048, "50/0", 0, "Pruning({10: 0.5})"),
        )
    ]
    panels = needles_found(rows)
    assert [*panels.values()] == [{(0, 1024): 75.0, (50, 2048): 25.0}, {(50, 2048): 0.0}]
    assert panel_title("dense\nmean 50.0", 3) == ["dense", "mean 50.0"]
    title = panel_title("Pruning({10: 0.5})\nmean 0.0", 1)
    assert title[-1] == "mean 0.0"
    assert max(map(len, title)) <= CHARACTERS_PER_INCH
    assert plot_needle_map(panels, tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    rows = [rows[0] | {"dataset": f"niah_single_1@{length}"} for length in range(1000, 7000, 1000)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        drawn = plot_needle_map(panels, tmp_path / "map.svg").read_text(encoding="utf-8")
        many = plot_needle_map(needles_found(rows), tmp_path / "many.svg").read_text(encoding="utf-8")
    shown = re.findall(r">([^<>]+)</text>", drawn)
    expected = ["dense", "mean 50.0", "mean 0.0", "1,024", "2,048", "0", "50", "75", "25", "100"]
    expected += ["length, tokens", "depth of the needle, percent", "answers found, percent"]
    assert not [text for text in expected if text not in shown]
    assert "rotate(-45" in many  # labels of many lengths are slanted
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="a picture needs the package matplotlib: pip install"):
        plot_needle_map(panels, tmp_path / "none.png")
