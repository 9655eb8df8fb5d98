"""LongBench's metrics: each quirk worked by hand, and the official scores of recorded answers."""

# ruff: noqa: RUF001 (punctuation of full width is what some tests are about)

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazyllm.evaluation.longbench import metrics
from lazyllm.evaluation.longbench.datasets import CATEGORIES, DATA_SETS, ENGLISH, dataset
from lazyllm.evaluation.longbench.metrics import score, score_item
from lazyllm.evaluation.options import DataOptions

LONGBENCH = Path(os.environ.get("LAZYLLM_LONGBENCH") or Path(__file__).parents[2] / "shared" / "longbench").resolve()
PLAIN = [name for name in DATA_SETS if not name.endswith("_e")]


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-7)


# ---- the registry ------------------------------------------------------------------------------


METRICS_OF_ENGLISH = (
    "f1 f1 f1 f1 f1 f1 rouge rouge rouge classification f1 rouge count retrieval code_similarity code_similarity"
)


def test_the_sets_are_those_of_the_paper_in_its_order() -> None:
    assert " ".join(ENGLISH) == (
        "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news "
        "trec triviaqa samsum passage_count passage_retrieval_en lcc repobench-p"
    )
    assert " ".join(dataset(name).metric for name in ENGLISH) == METRICS_OF_ENGLISH
    assert tuple(name for names in CATEGORIES.values() for name in names) == ENGLISH
    assert [len(names) for names in CATEGORIES.values()] == [3, 3, 3, 3, 2, 2]
    chinese = [dataset(name) for name in PLAIN if name not in ENGLISH]
    assert {data.name: data.metric for data in chinese if data.language == "zh"} == {
        "multifieldqa_zh": "f1_zh",
        "dureader": "rouge_zh",
        "vcsum": "rouge_zh",
        "lsht": "classification",
        "passage_retrieval_zh": "retrieval_zh",
    }
    assert {name for name in PLAIN if DATA_SETS[name].first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    graded = [name.removesuffix("_e") for name in DATA_SETS if name not in PLAIN]
    assert graded == [name for name in ENGLISH if name not in {"narrativeqa", "musique", "qmsum"}]
    assert [dataset(f"{name}_e").metric for name in graded] == [dataset(name).metric for name in graded]


# ---- each metric, worked by hand ---------------------------------------------------------------


WORKED: dict[str, list[tuple[str, str, float]]] = {
    "f1": [
        # a word counts as often as both have it
        ("red green", "red blue", 1 / 2),
        ("yes yes yes", "yes no", 2 / 5),  # precision 1/3, recall 1/2
        ("yes yes no", "yes yes", 4 / 5),  # precision 2/3
        *(("red", "blue", 0.0), ("", "red", 0.0), ("", "", 0.0)),
        # case, articles and ASCII punctuation do not count
        *(("The Cat, an (A) dog!", "cat dog", 1.0), ("a", "the", 0.0), ("theatre", "atre", 0.0)),
        *(("Paris’", "Paris", 0.0), ("Paris'", "Paris", 1.0)),
        # punctuation goes before articles, and nothing takes its place
        ("the-art", "art", 0.0),  # one word: theart
        *(("well-known", "wellknown", 1.0), ("well-known", "well known", 0.0)),
    ],
    "f1_zh": [
        *(("我喜欢苹果", "他喜欢苹果", 2 / 3), ("苹 果", "苹 果", 1.0)),
        ("喜欢 苹果", "喜欢苹果", 1.0),  # the blank is a segment that is dropped
        ("", "苹果", 0.0),
        # case and most Chinese punctuation do not count, articles do
        *(("苹果。", "苹果", 1.0), ("（苹果），", "苹果", 1.0), ("苹果》", "苹果", 1.0)),
        ("《苹果", "苹果", 2 / 3),  # the opening bracket stays: precision 1/2
        *(("苹果．", "苹果", 2 / 3), ("ABC", "abc", 1.0), ("the cat", "cat", 2 / 3)),
    ],
    "rouge": [
        # F of the longest common subsequence, in which each word counts once
        *(("red green blue", "red black blue", 2 / 3), ("blue red", "red blue", 1 / 2), ("Red", "red", 0.0)),
        *(("red,", "red", 0.0), ("red red red blue", "red blue", 1.0)),
        ("red red blue black", "red blue", 4 / 5),
        # a full stop ends a sentence, and the sentences' subsequences are united
        *(("blue. red", "red blue", 1.0), ("3.5", "5.3", 1.0)),
        ("red? blue", "red. blue", 1 / 2),  # the question mark ends nothing and stays on its word
        # a blank sentence is an empty word
        ("red. ", "red", 2 / 3),  # precision 1/2
        (" ", "red. ", 2 / 3),  # recall 1/2
        ("red.", "red", 1.0),
        *((empty, "red", 0.0) for empty in ("", ".", "...")),
        *(("red", empty, 0.0) for empty in ("", ".", "...")),
        *((empty, empty, 0.0) for empty in ("", ".", "...")),
    ],
    "rouge_zh": [
        # segments are words, and no Chinese full stop ends a sentence
        ("喜欢苹果", "喜欢香蕉", 1 / 2),
        ("香蕉。苹果", "苹果。香蕉", 1 / 3),
        ("香蕉.苹果", "苹果.香蕉", 1.0),
        ("", "苹果", 0.0),
    ],
    "count": [
        # every number, digit for digit
        *(("5", "5", 1.0), ("3 and 5, so 5", "5", 2 / 3), ("05", "5", 0.0), ("15", "5", 0.0)),
        *(("5.0", "5", 1 / 2), ("five", "5", 0.0)),
    ],
    "retrieval": [
        ("Paragraph 5", "Paragraph 5", 1.0),
        ("5", "Paragraph 5", 1.0),
        ("Paragraph 5 of 30", "Paragraph 5", 1 / 2),
        ("Paragraph 15", "Paragraph 5", 0.0),
        ("5", "Paragraph 5, not Paragraph 6", 1.0),
        ("6", "Paragraph 5, not Paragraph 6", 0.0),
        ("none", "Paragraph 5", 0.0),
    ],
    "retrieval_zh": [("段落5", "段落5", 1.0), ("段落5，段落6", "段落5", 1 / 2), ("", "段落5", 0.0)],
}


@pytest.mark.parametrize("name", WORKED)
def test_metrics_as_worked_by_hand(name: str) -> None:
    metric = metrics.METRICS[name]
    for prediction, answer, expected in WORKED[name]:
        assert metric(prediction, answer) == close(expected), (prediction, answer)


def test_chinese_punctuation_is_the_list_of_the_official_scorer() -> None:
    beyond_ascii = metrics.CHINESE_PUNCTUATION - metrics.PUNCTUATION
    assert len(beyond_ascii) == 74
    assert beyond_ascii > set("，。、；：？！“”‘’（）【】「」『』…—～")
    assert not beyond_ascii & set("《〈〉．·￥ 　")


def test_rouge_depends_neither_on_the_recursion_limit_nor_on_the_callers_stack() -> None:
    """A sentence of 1000 words is too long for the official scorer."""

    def below(frames: int, steps: int) -> float:
        if frames:
            return below(frames - 1, steps)
        return metrics.rouge(" ".join(f"w{i}" for i in range(steps)), "w0")

    usual = sys.getrecursionlimit()
    try:
        for limit, frames in ((1000, 0), (1000, 500), (3000, 0), (3000, 2000)):
            sys.setrecursionlimit(limit)
            assert below(frames, 980) == close(2 / 981)  # precision 1/980
            assert below(frames, 1000) == 0.0
    finally:
        sys.setrecursionlimit(usual)


def test_classification_by_hand() -> None:
    for all_classes, prediction, answer, expected in (
        # the classes named share the point; the nearest one is never taken
        ("Food Animal Sport", "It is Food.", "Food", 1.0),
        ("Food Animal Sport", "Food, Food", "Food", 1.0),
        ("Food Animal Sport", "Food or Animal", "Food", 1 / 2),
        ("Food Animal Sport", "Animal", "Food", 0.0),
        ("Food Animal Sport", "food", "Food", 0.0),
        ("Food Animal Sport", "", "Food", 0.0),
        ("Food Animal Sport", "Foo", "Food", 0.0),
        # a class within the answer is forgiven, one around it is not
        ("Other Other_entity", "Other_entity", "Other_entity", 1.0),
        ("Other Other_entity", "Other_entity", "Other", 1 / 2),
        # the class after one that is removed is passed over
        ("a ab abc", "abc", "abc", 1 / 2),  # a goes, ab is passed over
        ("a ab b abc", "abc", "abc", 1 / 2),  # a and b go
        ("a xx ab abc", "abc xx", "abc", 1 / 2),  # xx is passed over, ab goes
    ):
        assert metrics.classification(prediction, answer, all_classes.split()) == expected, prediction


@pytest.mark.parametrize("edit_sim", metrics.EDIT_SIMS)
def test_code_similarity_by_hand(edit_sim: str) -> None:
    for prediction, answer, expected in (
        # the first line without marks
        ("\n\n# so\n```python\nx = y // 2\nreturn a\nreturn b", "return a", 1.0),
        ("a = b / c", "a = b / c", 1.0),
        ("return a # so", "return a # so", 0.0),
        ("# so", "x", 0.0),
        ("# so", "", 1.0),
        ("# so\n\nreturn a", "return a", 0.0),  # the empty line is a line
        ("\n  \nreturn a", "return a", 0.2),  # so is the blank one: 1 sign of 10 / 2
        # in whole percents, halves to even
        ("  return a", "return a", 0.89),  # 16 / 18
        ("abc", "abd", 0.67),
        ("a", "a" + 14 * "b", 0.12),  # 12.5 %
        ("abc", "abc" + 10 * "x", 0.38),  # 37.5 %
    ):
        assert metrics.code_similarity(prediction, answer, edit_sim) == expected, prediction


def test_difflib_takes_no_start_from_signs_frequent_in_a_long_answer() -> None:
    both = ("c" + 150 * "ab", 150 * "ab")
    assert metrics.code_similarity(*both, "difflib") == 0.0
    assert metrics.code_similarity(*both, "levenshtein") == 1.0  # 99.8 %
    assert metrics.code_similarity("c" + 150 * "ab", 50 * "ab", "difflib") == 0.5  # 100 signs of 401 / 2


# ---- scores ------------------------------------------------------------------------------------


def test_scores_are_means_in_percent_of_the_first_line_or_all_and_the_best_answer() -> None:
    for name in ("triviaqa", "triviaqa_e"):
        assert score_item(name, "\n\nred\nblue", ["red"]) == 1.0
        assert score_item(name, " \nred", ["red"]) == 0.0
    assert score_item("hotpotqa", "red\nblue", ["red"]) == close(2 / 3)
    assert score_item("hotpotqa", "red", ["blue", "red", "red blue"]) == 1.0
    assert score("passage_count", ["1", "2", "3"], [["1"]] * 3) == 33.33
    assert score("trec", ["Food\nAnimal", "Food Animal"], [["Food"]] * 2, ["Food", "Animal"]) == 75.0
    assert score("hotpotqa", ["red"], [["blue"]]) == 0.0


def test_code_is_scored_as_with_the_benchmarks_own_requirements() -> None:
    """They list fuzzywuzzy without python-Levenshtein, which then uses difflib."""
    preds, answers = ["QQa1b2c3d"], [["a4b5c6dQQ"]]  # difflib: the run QQ, with nothing on one side of it
    assert score("lcc", preds, answers) == score("repobench-p_e", preds, answers, edit_sim="difflib") == 22.0
    assert score("lcc", preds, answers, edit_sim="levenshtein") == 44.0  # a, b, c, d: 4 signs of 18 / 2
    assert list(metrics.EDIT_SIMS) == ["difflib", "levenshtein"]
    assert DataOptions().edit_sim == "difflib"


def test_what_is_refused() -> None:
    for arguments, kind, words in (
        (("HotPotQA", ["a"], [["a"]]), ValueError, "no LongBench data set 'HotPotQA'; did you mean hotpotqa"),
        (("hotpotqa", [], []), ValueError, "preds must not be empty"),
        (("hotpotqa", ["a"], [["a"], ["b"]]), ValueError, "equally many, not 1 and 2"),
        (("hotpotqa", ["a", "b"], [["a"], []]), ValueError, "answers of item 1 must not be empty"),
        (("hotpotqa", "a", [["a"]]), TypeError, "preds must be a list, not 'a'"),
        (("hotpotqa", ["a"], ["a"]), TypeError, "answers of item 0 must be a list, not 'a'"),
        (("hotpotqa", ["a"], "a"), TypeError, "answers of item 0 must be a list, not 'a'"),
        (("hotpotqa", ["a"], [[3]]), TypeError, "answers of item 0 must hold strings only, not 3"),
        (("hotpotqa", ["a", None], [["a"], ["a"]]), TypeError, "preds must hold strings only, not None"),
        (("trec", ["a"], [["a"]]), TypeError, "all_classes, the labels of trec, must be a list, not None"),
        (("trec", ["a"], [["a"]], []), ValueError, "all_classes, the labels of trec, must not be empty"),
        (("passage_retrieval_en", ["5"], [["段落5"]]), ValueError, "'Paragraph ' and a number, not '段落5'"),
        (("hotpotqa", ["a"], [["a"]], None, "jaro"), ValueError, "difflib or levenshtein, not 'jaro'"),
    ):
        with pytest.raises(kind, match=words):
            score(*arguments)


def test_a_package_that_is_missing_or_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics._rouge.cache_clear()
    metrics._segmenter.cache_clear()
    for package, name in (("rouge", "gov_report"), ("jieba", "multifieldqa_zh"), ("rapidfuzz", "lcc")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"the package {package}: pip install 'lazyllm-engine\[longb"):
            score(name, ["a"], [["b"]], edit_sim="levenshtein")
    monkeypatch.undo()
    monkeypatch.setattr(metrics, "metadata", SimpleNamespace(version=lambda package: "0.3.2"))
    with pytest.raises(ImportError, match=r"rouge 1\.0\.1, not 0\.3\.2: pip install"):
        metrics.rouge("a", "b")


@pytest.mark.skipif(
    not (LONGBENCH / "official_scores.json").is_file(),
    reason="no recorded answers of LongBench: LAZYLLM_LONGBENCH may name a folder with pred/*.jsonl and "
    "official_scores.json",
)
@pytest.mark.parametrize("edit_sim", metrics.EDIT_SIMS)
@pytest.mark.parametrize("name", PLAIN)
def test_recorded_answers_have_their_official_score(name: str, edit_sim: str) -> None:
    official = json.loads((LONGBENCH / "official_scores.json").read_text())
    lines = (LONGBENCH / "pred" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    preds, answers = [row["pred"] for row in rows], [row["answers"] for row in rows]
    expected = official.get(f"{name}|{edit_sim}", official[name])
    assert score(name, preds, answers, rows[-1]["all_classes"], edit_sim) == pytest.approx(expected, abs=1e-9)
