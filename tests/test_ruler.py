"""Generated long-context tasks: the same everywhere, as long as asked, answers exactly where promised."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyllm.config import ModelConfig
from lazyllm.longbench import niah, ruler
from lazyllm.longbench.items import checked
from lazyllm.longbench.ruler import ONE_NEEDLE, TASKS, Draws, Haystack, fit, generate
from lazyllm.longbench.string_match import string_match
from lazyllm.tokenizer import Tokenizer

NEEDLE = re.compile(r"(?:The|One) secret code of (\S+) is (\S+)\.")
NEEDLES = [name for name in TASKS if name.startswith("niah")]
IN_TEXT = [name for name in NEEDLES if name not in ("niah_multikey_2", "niah_multikey_3")]


class Pieces:
    """A tokenizer that needs no files: words and marks."""

    def encode(self, text: str) -> list[int]:
        return [len(piece) for piece in re.findall(r"\w+|[^\w\s]", text)]


PIECES = Pieces()


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Path) -> Tokenizer:
    settings = json.loads((demo_model / "config.json").read_text(encoding="utf-8"))
    return Tokenizer.from_folder(demo_model, ModelConfig.from_dict(settings))


def prompt(item: dict[str, Any]) -> str:
    return TASKS[item["dataset"]].template.format(**item)


def around(item: dict[str, Any]) -> str:
    """The prompt without its context."""
    return TASKS[item["dataset"]].template.format(**{**item, "context": ""})


def needle_of(item: dict[str, Any]) -> str:
    (found,) = (match[0] for match in NEEDLE.finditer(item["context"]) if match[2] == item["answers"][0])
    return found


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    folder = tmp_path / "prose"
    folder.mkdir()
    (folder / "b.txt").write_text("Then the ferry left. “Late again!” said\nthe baker.\n", encoding="utf-8")
    (folder / "a.txt").write_text("A heading\n\nFirst the gulls woke, all of them.", encoding="utf-8")
    (folder / "c.md").write_text("Not a text file.", encoding="utf-8")
    return folder


# ---- the same everywhere -------------------------------------------------------------------------

DIGESTS = {
    "niah_single_1": "614e79760d79b662",
    "niah_single_2": "e911325b853b0e9d",
    "niah_single_3": "eea3521b0f36c91a",
    "niah_multikey_1": "b731057d22a8c962",
    "niah_multikey_2": "4c23d627799f1221",
    "niah_multikey_3": "451195a6ef66e8c8",
    "niah_multivalue": "78ea5313f6594c88",
    "niah_multiquery": "36207906defed157",
    "vt": "4589678db140e0b2",
    "cwe": "01ee1d15b682f159",
    "fwe": "ad9555369974ff80",
}


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_bytes(task: str) -> None:
    made = generate(task, PIECES, 1500, count=2, seed=7)
    lines = "\n".join(json.dumps(item) for item in made)
    assert sha256(lines.encode()).hexdigest()[:16] == DIGESTS[task]


def test_an_item_does_not_depend_on_how_many_are_made() -> None:
    assert generate("vt", PIECES, 900, count=3, seed=1)[:2] == generate("vt", PIECES, 900, count=2, seed=1)


@pytest.mark.parametrize("task", TASKS)
def test_seeds_lengths_and_numbers_give_other_items(task: str) -> None:
    made = [*generate(task, PIECES, 1000, 2, 0), *generate(task, PIECES, 1000, 2, 1)]
    made += generate(task, PIECES, 1100, 2, 0)
    assert len({tuple(item["answers"]) for item in made}) == len(made)
    assert len({item["_id"] for item in made}) == len(made)


def test_an_order_has_each_place_once() -> None:
    assert sorted(Draws("a").order(50)) == [*range(50)]
    assert [*Draws("a").order(50)] != [*Draws("b").order(50)]
    assert [*islice(Draws("a").order(50), 5)] == [*Draws("a").order(50)][:5]


def test_a_fork_does_not_depend_on_earlier_draws() -> None:
    early, late = Draws("a"), Draws("a")
    late.percent()
    assert early.fork("b").below(10**9) == late.fork("b").below(10**9)
    assert early.fork("b").below(10**9) != early.fork("c").below(10**9)


def test_draws_are_even() -> None:
    draws = Draws("a")
    counts = Counter(draws.below(5) for _ in range(5000))
    assert sorted(counts) == [0, 1, 2, 3, 4]
    assert max(counts.values()) < 1150


# ---- the form ------------------------------------------------------------------------------------


def test_the_tasks() -> None:
    assert [*TASKS] == [
        *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2"),
        *("niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
    ]
    assert {task.category for task in TASKS.values()} == {"Retrieval", "Multi-hop Tracing", "Aggregation"}
    assert list(ONE_NEEDLE) == [*TASKS][:6]
    assert all(task.name == name and task.max_new_tokens > 0 for name, task in TASKS.items())


@pytest.mark.parametrize("task", TASKS)
def test_items_have_the_benchmarks_fields(task: str) -> None:
    (item,) = generate(task, PIECES, 1000, count=1, seed=3)
    assert checked("here", item, task) is item
    assert (item["language"], item["all_classes"], item["length"]) == ("en", None, 1000)
    assert json.loads(json.dumps(item)) == item
    where = f"-depth{item['depth']}" if task in ONE_NEEDLE else ""
    assert item["_id"] == f"{task}-1000{where}-seed3-0"
    assert (item["depth"] is None) == (task not in ONE_NEEDLE)


@pytest.mark.parametrize("length", [700, 722, 1024, 2500, 6000])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_the_length(task: str, length: int, demo_tokenizer: Tokenizer) -> None:
    for item in generate(task, demo_tokenizer, length, count=2, seed=0):
        assert 0.97 * length <= len(demo_tokenizer.encode(prompt(item))) <= length


@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_the_length_of_another_tokenizer(task: str) -> None:
    for length in (500, 733, 3000):
        (item,) = generate(task, PIECES, length, count=1, seed=0)
        assert 0.97 * length <= len(PIECES.encode(prompt(item))) <= length


def test_fit_finds_the_last_size_below() -> None:
    assert fit(lambda size: 10 * size, 95, least=1) == (9, 90)
    assert fit(lambda size: 10 * size, 90, least=1) == (9, 90)
    assert fit(lambda size: size * size, 50, least=3) == (7, 49)
    assert fit(lambda size: 10 * size, 95, least=10) == (10, 100)


# ---- answers where promised ----------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_answers_stand_in_the_context_only(task: str) -> None:
    for item in generate(task, PIECES, 1200, count=5, seed=0):
        assert string_match(item["context"], item["answers"]) == 1
        assert string_match(around(item), item["answers"]) == 0
        assert len({*item["answers"]}) == len(item["answers"])


@pytest.mark.parametrize(
    ("task", "needles", "answers"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles_are_as_many_as_promised(task: str, needles: int, answers: int) -> None:
    for item in generate(task, PIECES, 1200, count=5, seed=0):
        assert len(NEEDLE.findall(item["context"])) == needles
        assert len(item["answers"]) == answers


@pytest.mark.parametrize("task", NEEDLES)
def test_codes_of_other_keys_are_no_answers(task: str) -> None:
    for item in generate(task, PIECES, 1200, count=5, seed=0):
        found = NEEDLE.findall(item["context"])
        asked = [code for key, code in found if key in item["input"]]
        assert sorted(asked) == sorted(item["answers"])
        assert len({code for _, code in found}) == len(found)
        assert all(item["context"].count(answer) == 1 for answer in item["answers"])


@pytest.mark.parametrize(
    ("task", "code"), [("niah_multikey_2", r"\d{7}"), ("niah_multikey_3", r"[0-9a-f-]{36}")]
)
def test_needles_alone_fill_the_text(task: str, code: str) -> None:
    (item,) = generate(task, PIECES, 4000, count=1, seed=0)
    found = NEEDLE.findall(item["context"])
    assert len(found) > 100
    assert len({key for key, _ in found}) == len(found)
    assert all(re.fullmatch(code, value) for _, value in found)
    rest = PIECES.encode(NEEDLE.sub("", item["context"]))
    assert len(rest) < ruler.UUID_FILLER * 1.2


def test_the_value_passes_from_variable_to_variable() -> None:
    for item in generate("vt", PIECES, 1200, count=5, seed=0):
        (value,) = {*re.findall(r"\d+", item["input"])} - {"5"}
        holders = [value]
        for new, old in re.findall(r"Let (\w+) be (\w+)\.", item["context"]):
            assert old == holders[-1]
            holders.append(new)
        assert holders[1:] == item["answers"]
        assert len(item["answers"]) == 5


@pytest.mark.parametrize(("length", "often", "seldom"), [(1500, 6, 1), (4096, 30, 3)])
def test_common_words_are_the_commonest(length: int, often: int, seldom: int) -> None:
    for item in generate("cwe", PIECES, length, count=2, seed=0):
        entries = re.findall(r"(\d+)\. (\S+)", item["context"])
        assert [int(number) for number, _ in entries] == [*range(1, len(entries) + 1)]
        counts = Counter(word for _, word in entries)
        assert sorted(item["answers"]) == sorted(word for word, count in counts.items() if count == often)
        assert max(count for word, count in counts.items() if word not in item["answers"]) == seldom
        assert not any(answer in word for answer in item["answers"] for word in counts if word != answer)
        assert [word for _, word in entries[:10]] != item["answers"]


@pytest.mark.parametrize("length", [*range(155, 350, 7), 1500, 20000])
def test_frequent_words_are_the_most_frequent(length: int) -> None:
    for item in generate("fwe", PIECES, length, count=2, seed=0):
        counts = Counter(item["context"].split())
        (dots, _), *ranked = counts.most_common()
        assert dots == "..."
        assert [word for word, _ in ranked[:3]] == item["answers"]
        assert ranked[2][1] > ranked[3][1]


def test_counts_fall_with_the_square_of_the_rank() -> None:
    (item,) = generate("fwe", PIECES, 20000, count=1, seed=0)
    ranked = [count for _, count in Counter(item["context"].split()).most_common()]
    least, most = 4 * ranked[1], 4 * ranked[1] + 4
    assert least <= ranked[0] < most + ruler.DOTS_FILLER
    assert len(ranked) == math.isqrt(least)
    assert all(least // rank**2 <= count <= most // rank**2 for rank, count in enumerate(ranked[1:], 2))


def test_no_word_of_a_name_is_the_end_of_another() -> None:
    pairs = [(one, other) for one in ruler.WORDS for other in ruler.WORDS if one != other]
    assert len({*ruler.WORDS}) == len(ruler.WORDS)
    assert not [pair for pair in pairs if pair[0].startswith(pair[1]) or pair[0].endswith(pair[1])]


def test_names_come_once_and_run_out_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruler, "WORDS", ("moon", "star", "sun"))
    made = [*islice(ruler.names(Draws("a")), 6)]
    assert sorted(made) == ["moon-star", "moon-sun", "star-moon", "star-sun", "sun-moon", "sun-star"]
    with pytest.raises(ValueError, match="more than the 6 names there are; use a smaller length"):
        generate("niah_multikey_2", PIECES, 1000, count=1, seed=0)


# ---- depth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 12.5, 50, 81, 100, None])
@pytest.mark.parametrize("task", ONE_NEEDLE)
def test_the_needle_is_as_deep_as_asked(task: str, depth: float | None) -> None:
    (item,) = generate(task, PIECES, 2000, count=1, seed=0, depth=depth)
    needle = needle_of(item)
    before, after = item["context"].split(needle)
    if task not in IN_TEXT:
        before, after = ("".join(match[0] for match in NEEDLE.finditer(part)) for part in (before, after))
    words, rest = len(before.split()), len(after.split())
    assert 100 * words / (words + rest) == pytest.approx(item["depth"], abs=1)
    assert item["depth"] == depth or depth is None


def test_the_ends_are_depths_too() -> None:
    for task in IN_TEXT[:3]:
        (top,) = generate(task, PIECES, 900, count=1, seed=0, depth=0)
        (bottom,) = generate(task, PIECES, 900, count=1, seed=0, depth=100)
        assert top["context"].startswith(needle_of(top))
        assert bottom["context"].endswith(needle_of(bottom))


def test_a_drawn_depth_is_one_that_can_be_asked_for() -> None:
    (drawn,) = generate("niah_single_1", PIECES, 900, count=1, seed=5)
    assert generate("niah_single_1", PIECES, 900, count=1, seed=5, depth=float(drawn["depth"])) == [drawn]


def test_needles_stand_between_sentences() -> None:
    for item in generate("niah_multiquery", PIECES, 1200, count=5, seed=0):
        for match in NEEDLE.finditer(item["context"]):
            before = item["context"][: match.start()].rstrip()
            assert not before or before.endswith(".")


# ---- the text around -----------------------------------------------------------------------------


def test_prose_is_read_in_the_order_of_names(prose: Path) -> None:
    assert Haystack.read(prose).sentences == [
        "A heading",
        "First the gulls woke, all of them.",
        "Then the ferry left.",
        "“Late again!”",
        "said the baker.",
    ]


def test_text_is_repeated_and_cut_to_so_many_words() -> None:
    text = Haystack("One, two, three. Four five.")
    assert text.first(2) == ["One, two."]
    assert text.first(5) == ["One, two, three.", "Four five."]
    assert text.first(6, start=1) == ["Four five.", "One, two, three.", "Four."]
    assert text.around([(60, "HERE."), (0, "THERE.")], 5, 0) == "THERE. One, two, three. HERE. Four five."


def test_prose_surrounds_the_needles(prose: Path) -> None:
    for task in IN_TEXT:
        (item,) = generate(task, PIECES, 600, count=1, seed=0, prose=prose)
        assert ("ferry" in item["context"]) == (task != "niah_single_1")
        assert 0.97 * 600 <= len(PIECES.encode(prompt(item))) <= 600


def test_what_the_text_holds_by_itself_is_no_needle() -> None:
    assert [*ruler.distinct(["a1", "b2", "a1", "c3"], Haystack("Here is B2."))] == ["a1", "c3"]


@pytest.mark.parametrize(
    ("files", "error", "told"),
    [
        (None, FileNotFoundError, "is no folder"),
        ({}, ValueError, "no .txt file with text"),
        ({"a.txt": b" \n"}, ValueError, "no .txt file with text"),
        ({"a.txt": b"caf\xe9"}, ValueError, "a.txt is not UTF-8 text"),
        (
            {"a.txt": b"a-" * 300 + b"b. Short."},
            ValueError,
            "the nearest below for item 0 of niah_single_2 is",
        ),
    ],
)
def test_prose_that_cannot_be_used(
    files: dict[str, bytes] | None, error: type[Exception], told: str, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    with pytest.raises(error, match=told):
        generate("niah_single_2", PIECES, 9500, count=1, seed=0, prose=folder)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_a_length_too_short_is_refused_with_the_least(task: str) -> None:
    with pytest.raises(
        ValueError, match=rf"length is 20; item 0 of {task} needs at least \d+ tokens"
    ) as told:
        generate(task, PIECES, 20, count=1, seed=0)
    least = int(re.findall(r"\d+", str(told.value))[-1])
    assert 20 < least < 500


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"task": "niah_singel_1"}, ValueError, "no task 'niah_singel_1'; did you mean niah_single_1"),
        ({"task": "qqq"}, ValueError, "no task 'qqq'; expected one of niah_single_1, .*, fwe"),
        ({"task": None}, TypeError, "named by a string, not None"),
        ({"length": 0}, ValueError, "length must be at least 1, not 0"),
        ({"length": 1e3}, TypeError, "length must be a whole number, not 1000.0"),
        ({"count": 0}, ValueError, "count must be at least 1"),
        ({"count": True}, TypeError, "count must be a whole number, not True"),
        ({"seed": -1}, ValueError, "seed must be at least 0, not -1"),
        ({"seed": None}, TypeError, "seed must be a whole number, not None"),
        ({"depth": 101}, ValueError, "depth must be from 0 to 100 percent, not 101"),
        ({"depth": float("nan")}, ValueError, "depth must be from 0 to 100 percent, not nan"),
        ({"depth": "50"}, TypeError, "depth must be a percentage or None, not '50'"),
        ({"task": "vt", "depth": 50}, ValueError, "depth is for niah_single_1, .*; vt takes None"),
    ],
)
def test_bad_input_is_refused_by_name(given: dict[str, Any], error: type[Exception], told: str) -> None:
    options = {"task": "niah_single_1", "tokenizer": PIECES, "length": 500, "count": 1, "seed": 0, **given}
    with pytest.raises(error, match=told):
        generate(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    plain = generate("niah_single_1", PIECES, 500, count=1, seed=2, depth=50)
    assert plain == generate(
        "niah_single_1", PIECES, np.int64(500), np.int32(1), np.uint8(2), depth=np.int64(50)
    )
    assert json.dumps(plain) == json.dumps(generate("niah_single_1", PIECES, 500, 1, 2, depth=np.float32(50)))


# ---- string match --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("It is 123.", ["123"], 1.0),
        ("It is 12 3.", ["123"], 0.0),
        ("abc DEF", ["ABC", "def", "ghi", "jkl"], 0.5),
        ("one, two", ["one", "two", "three"], 2 / 3),
        ("onetwo", ["one", "two"], 1.0),
        ("", ["one"], 0.0),
    ],
)
def test_string_match_by_hand(prediction: str, answers: list[str], score: float) -> None:
    assert string_match(prediction, answers) == score


@pytest.mark.parametrize(
    ("prediction", "answers", "error", "told"),
    [
        (None, ["a"], TypeError, "the prediction must be a string"),
        ("a", "a", TypeError, "answers must be a list of strings"),
        ("a", {"a"}, TypeError, "answers must be a list of strings"),
        ("a", [], ValueError, "answers must not be empty"),
        ("a", [1], TypeError, "strings only, not 1"),
        ("a", ["a", ""], ValueError, "an empty string"),
    ],
)
def test_string_match_refuses(prediction: Any, answers: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        string_match(prediction, answers)


# ---- the grid and its picture --------------------------------------------------------------------


def test_a_grid_has_each_length_and_depth(prose: Path) -> None:
    made = niah.grid(PIECES, [400, 800], depths=[0, 50, 100], count=2, task="niah_single_2", prose=prose)
    assert [(item["length"], item["depth"]) for item in made] == [
        (length, depth) for length in (400, 800) for depth in (0, 50, 100) for _ in range(2)
    ]
    assert len({item["_id"] for item in made}) == len(made)
    assert len({item["answers"][0] for item in made}) == 4


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"task": "vt"}, "a grid of depths needs one of niah_single_1, .*, not 'vt'"),
        ({"lengths": []}, "lengths must be different numbers, at least one"),
        ({"depths": [10, 10.0]}, "depths must be different numbers"),
    ],
)
def test_a_bad_grid_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        niah.grid(**{"tokenizer": PIECES, "lengths": [500], **given})


ROWS = [
    {"length": 1024, "depth": 0, "score": 1.0, "setting": "dense"},
    {"length": 1024, "depth": 0, "score": 0.5, "setting": "dense"},
    {"length": 2048, "depth": 50, "score": 0.25, "setting": "dense"},
    {"length": 2048, "depth": 50, "score": 0, "setting": "Pruning({10: 0.5})"},
]


def test_panels_hold_the_means() -> None:
    dense, pruned = niah.make_panels(ROWS)
    assert dense.cells == {(0, 1024): 75.0, (50, 2048): 25.0}
    assert pruned.cells == {(50, 2048): 0.0}
    assert dense.title(3) == ["dense", "mean 50.0"]
    assert pruned.title(1)[-1] == "mean 0.0"
    assert max(map(len, pruned.title(1))) <= niah.CHARACTERS_PER_INCH


def test_the_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = niah.heat_map(iter(ROWS), tmp_path / "map.png")
    assert file == tmp_path / "map.png"
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_picture_says_what_it_shows(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        drawn = niah.heat_map(ROWS, str(tmp_path / "map.svg")).read_text(encoding="utf-8")
    shown = re.findall(r">([^<>]+)</text>", drawn)
    expected = ["dense", "mean 50.0", "mean 0.0", "1,024", "2,048", "0", "50", "75", "25", "100"]
    expected += ["length, tokens", "depth of the needle, percent", "answers found, percent"]
    assert not [text for text in expected if text not in shown]


def test_without_matplotlib_the_picture_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pictures need matplotlib: pip install"):
        niah.heat_map(ROWS, tmp_path / "map.png")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "at least one row"),
        ([{**ROWS[0], "score": 75}], "row 0: score is 75; expected a number from 0 to 1"),
        ([ROWS[0], {**ROWS[0], "depth": -1}], "row 1: depth is -1; expected a number from 0 to 100"),
        ([{"depth": 0, "score": 1}], "row 0: length is None; expected a number of tokens"),
        ([{**ROWS[0], "score": float("nan")}], "row 0: score is nan"),
        ([{**ROWS[0], "score": True}], "row 0: score is True"),
    ],
)
def test_rows_that_cannot_be_drawn(rows: list[dict[str, Any]], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        niah.heat_map(rows, tmp_path / "map.png")
    assert not (tmp_path / "map.png").exists()
