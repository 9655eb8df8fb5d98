"""LongBench's metrics: each quirk worked by hand, and the official scores of recorded answers."""

# ruff: noqa: RUF001 (punctuation of full width is what some tests are about)

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazyllm.evaluation.longbench import metrics
from lazyllm.evaluation.longbench.datasets import CATEGORIES, DATA_SETS, ENGLISH, dataset, length_bin
from lazyllm.evaluation.longbench.scoring import score, score_item
from lazyllm.evaluation.options import DataOptions

Pairs = list[tuple[str, str, float]]
PLAIN = [name for name in DATA_SETS if not name.endswith("_e")]


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-7)


# ---- the registry ------------------------------------------------------------------------------


def test_english_sets_stand_in_the_papers_order() -> None:
    assert " ".join(ENGLISH) == (
        "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news "
        "trec triviaqa samsum passage_count passage_retrieval_en lcc repobench-p"
    )
    assert tuple(name for names in CATEGORIES.values() for name in names) == ENGLISH
    assert [len(names) for names in CATEGORIES.values()] == [3, 3, 3, 3, 2, 2]


def test_the_metrics_of_each_category_are_those_of_the_paper() -> None:
    assert [" ".join(dataset(name).metric for name in names) for names in CATEGORIES.values()] == [
        "f1 f1 f1",
        "f1 f1 f1",
        "rouge rouge rouge",
        "classification f1 rouge",
        "count retrieval",
        "code_similarity code_similarity",
    ]


@pytest.mark.parametrize(
    ("name", "category", "metric"),
    [
        ("multifieldqa_zh", "Single-Document QA", "f1_zh"),
        ("dureader", "Multi-Document QA", "rouge_zh"),
        ("vcsum", "Summarization", "rouge_zh"),
        ("lsht", "Few-shot Learning", "classification"),
        ("passage_retrieval_zh", "Synthetic", "retrieval_zh"),
    ],
)
def test_chinese_sets_have_a_category_too(name: str, category: str, metric: str) -> None:
    one = dataset(name)
    assert (one.category, one.metric, one.language) == (category, metric, "zh")
    assert name not in CATEGORIES[category]


def test_each_set_is_handled_as_the_official_scripts_do() -> None:
    def names(flag: str) -> set[str]:
        return {name for name in PLAIN if getattr(DATA_SETS[name], flag)}

    assert len(PLAIN) == 21
    assert set(PLAIN) - names("chat") == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert names("first_line") == {"trec", "triviaqa", "samsum", "lsht"}
    assert names("stop_at_newline") == {"samsum"}


def test_thirteen_sets_are_graded_by_length() -> None:
    graded = [name.removesuffix("_e") for name in DATA_SETS if name not in PLAIN]
    assert graded == [name for name in ENGLISH if name not in {"narrativeqa", "musique", "qmsum"}]
    assert len(graded) == 13
    for name in graded:
        plain, by_length = dataset(name), dataset(f"{name}_e")
        assert by_length.name == f"{name}_e"
        assert (by_length.metric, by_length.chat) == (plain.metric, plain.chat)


@pytest.mark.parametrize(
    ("length", "name"),
    [(0, "0-4k"), (3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+"), (10**6, "8k+")],
)
def test_length_bins_begin_with_their_bound(length: int, name: str) -> None:
    assert length_bin(length) == name


def test_an_unknown_name_is_refused_with_those_that_come_close() -> None:
    with pytest.raises(ValueError, match="no data set 'HotPotQA'; did you mean hotpotqa"):
        dataset("HotPotQA")
    with pytest.raises(ValueError, match="no data set '!'; it has narrativeqa, qasper"):
        dataset("!")
    with pytest.raises(TypeError, match="must be a string, not 3"):
        dataset(3)  # type: ignore[arg-type]


# ---- each metric, worked by hand ---------------------------------------------------------------


def check(metric: Callable[[str, str], float], pairs: Pairs) -> None:
    assert {pair[:2]: metric(*pair[:2]) for pair in pairs} == {pair[:2]: close(pair[2]) for pair in pairs}


def test_f1_counts_words_as_often_as_both_have_them() -> None:
    check(
        metrics.f1,
        [
            ("red green", "red blue", 1 / 2),
            ("yes yes yes", "yes no", 2 / 5),  # precision 1/3, recall 1/2
            ("yes yes no", "yes yes", 4 / 5),  # precision 2/3
            ("red", "blue", 0.0),
            ("", "red", 0.0),
            ("", "", 0.0),
        ],
    )


def test_f1_ignores_case_articles_and_punctuation() -> None:
    check(
        metrics.f1,
        [
            ("The Cat, an (A) dog!", "cat dog", 1.0),
            ("a", "the", 0.0),
            ("theatre", "atre", 0.0),
        ],
    )


def test_f1_drops_punctuation_before_articles_and_puts_nothing_in_its_place() -> None:
    check(
        metrics.f1,
        [
            ("the-art", "art", 0.0),  # one word: theart
            ("well-known", "wellknown", 1.0),
            ("well-known", "well known", 0.0),
        ],
    )


def test_f1_knows_ascii_punctuation_only() -> None:
    check(metrics.f1, [("Paris’", "Paris", 0.0), ("Paris'", "Paris", 1.0)])


def test_f1_zh_compares_segments() -> None:
    check(
        metrics.f1_zh,
        [
            ("我喜欢苹果", "他喜欢苹果", 2 / 3),
            ("苹 果", "苹 果", 1.0),
            ("喜欢 苹果", "喜欢苹果", 1.0),  # the blank is a segment that is dropped
            ("", "苹果", 0.0),
        ],
    )


def test_f1_zh_ignores_case_and_most_chinese_punctuation_but_no_articles() -> None:
    check(
        metrics.f1_zh,
        [
            ("苹果。", "苹果", 1.0),
            ("（苹果），", "苹果", 1.0),
            ("苹果》", "苹果", 1.0),
            ("《苹果", "苹果", 2 / 3),  # the opening bracket stays: precision 1/2
            ("苹果．", "苹果", 2 / 3),
            ("ABC", "abc", 1.0),
            ("the cat", "cat", 2 / 3),
        ],
    )


def test_chinese_punctuation_is_the_list_of_the_official_scorer() -> None:
    beyond_ascii = metrics.CHINESE_PUNCTUATION - metrics.PUNCTUATION
    assert len(beyond_ascii) == 74
    assert beyond_ascii > set("，。、；：？！“”‘’（）【】「」『』…—～")
    assert not beyond_ascii & set("《〈〉．·￥ 　")


def test_rouge_is_the_f_of_the_longest_common_subsequence() -> None:
    check(
        metrics.rouge,
        [
            ("red green blue", "red black blue", 2 / 3),
            ("blue red", "red blue", 1 / 2),
            ("Red", "red", 0.0),
            ("red,", "red", 0.0),
        ],
    )


def test_rouge_counts_each_word_once() -> None:
    check(metrics.rouge, [("red red red blue", "red blue", 1.0), ("red red blue black", "red blue", 4 / 5)])


def test_rouge_ends_sentences_at_each_full_stop_and_unites_their_subsequences() -> None:
    check(
        metrics.rouge,
        [
            ("blue. red", "red blue", 1.0),
            ("3.5", "5.3", 1.0),
            ("red? blue", "red. blue", 1 / 2),  # the question mark ends nothing and stays on its word
        ],
    )


def test_rouge_takes_a_blank_sentence_for_an_empty_word() -> None:
    check(
        metrics.rouge,
        [
            ("red. ", "red", 2 / 3),  # precision 1/2
            (" ", "red. ", 2 / 3),  # recall 1/2
            ("red.", "red", 1.0),
        ],
    )


@pytest.mark.parametrize("empty", ["", ".", "..."])
def test_rouge_of_a_text_without_sentence_is_0(empty: str) -> None:
    assert metrics.rouge(empty, "red") == metrics.rouge("red", empty) == metrics.rouge(empty, empty) == 0.0


def check_endless_sentences() -> None:
    def of_one_word(steps: int) -> float:
        return metrics.rouge(" ".join(f"w{i}" for i in range(steps)), "w0")

    assert of_one_word(980) == close(2 / 981)  # precision 1/980
    assert of_one_word(1000) == 0.0


def test_rouge_of_sentences_beyond_the_recursion_limit_is_0() -> None:
    check_endless_sentences()


def test_rouge_does_not_depend_on_the_callers_stack() -> None:
    def below(frames: int) -> None:
        return below(frames - 1) if frames else check_endless_sentences()

    below(500)


@pytest.mark.parametrize("limit", [1000, 3000])
def test_rouge_does_not_depend_on_the_recursion_limit(limit: int) -> None:
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        check_endless_sentences()
    finally:
        sys.setrecursionlimit(usual)


def test_rouge_zh_is_that_of_segments_whose_sentences_no_chinese_full_stop_ends() -> None:
    check(
        metrics.rouge_zh,
        [
            ("喜欢苹果", "喜欢香蕉", 1 / 2),
            ("香蕉。苹果", "苹果。香蕉", 1 / 3),
            ("香蕉.苹果", "苹果.香蕉", 1.0),
            ("", "苹果", 0.0),
        ],
    )


def check_classes(all_classes: list[str], pairs: Pairs) -> None:
    check(lambda prediction, answer: metrics.classification(prediction, answer, all_classes), pairs)


def test_classification_shares_the_point_among_the_classes_named() -> None:
    check_classes(
        ["Food", "Animal", "Sport"],
        [
            ("It is Food.", "Food", 1.0),
            ("Food, Food", "Food", 1.0),
            ("Food or Animal", "Food", 1 / 2),
            ("Animal", "Food", 0.0),
            ("food", "Food", 0.0),
            ("", "Food", 0.0),
        ],
    )


def test_classification_never_takes_the_nearest_class() -> None:
    check_classes(["Food", "Animal"], [("Foo", "Food", 0.0)])


def test_classification_forgives_classes_within_the_answer_not_those_around_it() -> None:
    check_classes(
        ["Other", "Other entity"],
        [("Other entity", "Other entity", 1.0), ("Other entity", "Other", 1 / 2)],
    )


def test_classification_passes_over_the_class_after_one_it_removes() -> None:
    check_classes(["a", "ab", "abc"], [("abc", "abc", 1 / 2)])  # a goes, ab is passed over
    check_classes(["a", "ab", "b", "abc"], [("abc", "abc", 1 / 2)])  # a and b go
    check_classes(["a", "xx", "ab", "abc"], [("abc xx", "abc", 1 / 2)])  # xx is passed over, ab goes


def test_count_takes_every_number_digit_for_digit() -> None:
    check(
        metrics.count,
        [
            ("5", "5", 1.0),
            ("3 and 5, so 5", "5", 2 / 3),
            ("05", "5", 0.0),
            ("15", "5", 0.0),
            ("5.0", "5", 1 / 2),
            ("five", "5", 0.0),
        ],
    )


def test_retrieval_takes_every_number() -> None:
    check(
        metrics.retrieval,
        [
            ("Paragraph 5", "Paragraph 5", 1.0),
            ("5", "Paragraph 5", 1.0),
            ("Paragraph 5 of 30", "Paragraph 5", 1 / 2),
            ("Paragraph 15", "Paragraph 5", 0.0),
            ("5", "Paragraph 5, not Paragraph 6", 1.0),
            ("6", "Paragraph 5, not Paragraph 6", 0.0),
            ("none", "Paragraph 5", 0.0),
        ],
    )


def test_retrieval_zh_takes_every_number() -> None:
    check(
        metrics.retrieval_zh, [("段落5", "段落5", 1.0), ("段落5，段落6", "段落5", 1 / 2), ("", "段落5", 0.0)]
    )


def test_an_answer_that_names_no_paragraph_is_refused() -> None:
    with pytest.raises(ValueError, match="must contain 'Paragraph ' and a number, not '段落5'"):
        metrics.retrieval("5", "段落5")


@pytest.mark.parametrize("edit_sim", ["levenshtein", "difflib"])
def test_code_similarity_is_of_the_first_line_without_marks(edit_sim: str) -> None:
    check(
        lambda prediction, answer: metrics.code_similarity(prediction, answer, edit_sim),
        [
            ("\n\n# so\n```python\nx = y // 2\nreturn a\nreturn b", "return a", 1.0),
            ("a = b / c", "a = b / c", 1.0),
            ("return a # so", "return a # so", 0.0),
            ("# so", "x", 0.0),
            ("# so", "", 1.0),
            ("# so\n\nreturn a", "return a", 0.0),  # the empty line is a line
            ("\n  \nreturn a", "return a", 0.2),  # so is the blank one: 1 sign of 10 / 2
            ("  return a", "return a", 16 / 18 + 0.01 / 9),  # 88.89 %
        ],
    )


@pytest.mark.parametrize("edit_sim", ["levenshtein", "difflib"])
def test_code_similarity_is_in_whole_percents_halves_to_even(edit_sim: str) -> None:
    check(
        lambda prediction, answer: metrics.code_similarity(prediction, answer, edit_sim),
        [
            ("abc", "abd", 0.67),
            ("a", "a" + 14 * "b", 0.12),  # 12.5 %
            ("abc", "abc" + 10 * "x", 0.38),  # 37.5 %
        ],
    )


def test_the_two_edit_similarities_differ() -> None:
    both = ("QQa1b2c3d", "a4b5c6dQQ")
    assert metrics.code_similarity(*both, "levenshtein") == 0.44  # a, b, c, d: 4 signs of 18 / 2
    assert metrics.code_similarity(*both, "difflib") == 0.22  # the run QQ, with nothing on one side of it


def test_difflib_takes_no_start_from_signs_frequent_in_a_long_answer() -> None:
    both = ("c" + 150 * "ab", 150 * "ab")
    assert metrics.code_similarity(*both, "difflib") == 0.0
    assert metrics.code_similarity(*both, "levenshtein") == 1.0  # 99.8 %
    assert metrics.code_similarity("c" + 150 * "ab", 50 * "ab", "difflib") == 0.5  # 100 signs of 401 / 2


# ---- scores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["triviaqa", "triviaqa_e"])
def test_only_the_first_line_counts_where_examples_are_shown(name: str) -> None:
    assert score_item(name, "\n\nred\nblue", ["red"]) == 1.0
    assert score_item(name, " \nred", ["red"]) == 0.0


def test_all_lines_count_elsewhere() -> None:
    assert score_item("hotpotqa", "red\nblue", ["red"]) == close(2 / 3)


def test_the_best_answer_counts() -> None:
    assert score_item("hotpotqa", "red", ["blue", "red", "red blue"]) == 1.0


def test_score_is_a_mean_in_percent_with_two_decimals() -> None:
    assert score("passage_count", ["1", "2", "3"], [["1"]] * 3) == 33.33
    assert score("trec", ["Food\nAnimal", "Food Animal"], [["Food"]] * 2, ["Food", "Animal"]) == 75.0
    assert score("hotpotqa", ["red"], [["blue"]]) == 0.0


def test_edit_sim_reaches_the_metric_of_code() -> None:
    preds, answers = ["QQa1b2c3d"], [["a4b5c6dQQ"]]
    assert score("lcc", preds, answers, edit_sim="levenshtein") == 44.0
    assert score("repobench-p_e", preds, answers, edit_sim="difflib") == 22.0


def test_code_is_scored_as_with_the_benchmarks_own_requirements() -> None:
    """They list fuzzywuzzy without python-Levenshtein, which then uses difflib."""
    assert score("lcc", ["QQa1b2c3d"], [["a4b5c6dQQ"]]) == 22.0
    assert score_item("lcc", "QQa1b2c3d", ["a4b5c6dQQ"]) == 0.22
    assert list(metrics.EDIT_SIMS) == ["difflib", "levenshtein"]
    assert DataOptions().edit_sim == "difflib"


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("hotpot", ["a"], [["a"]]), ValueError, "did you mean hotpotqa"),
        (("hotpotqa", [], []), ValueError, "preds must not be empty"),
        (("hotpotqa", ["a"], [["a"], ["b"]]), ValueError, "equally many, not 1 and 2"),
        (("hotpotqa", ["a", "b"], [["a"], []]), ValueError, "answers of item 1 must not be empty"),
        (("hotpotqa", "a", [["a"]]), TypeError, "preds must be a list, not 'a'"),
        (("hotpotqa", ["a"], ["a"]), TypeError, "answers of item 0 must be a list, not 'a'"),
        (("hotpotqa", ["a"], "a"), TypeError, "answers must be a list, not 'a'"),
        (("hotpotqa", ["a"], [[3]]), TypeError, "answers of item 0 must hold strings only, not 3"),
        (("hotpotqa", ["a", None], [["a"], ["a"]]), TypeError, "of item 1 must be a string, not None"),
        (("trec", ["a"], [["a"]]), ValueError, "trec needs all_classes"),
        (("trec", ["a"], [["a"]], []), ValueError, "all_classes must not be empty"),
        (("trec", ["a"], [["a"]], "a"), TypeError, "all_classes must be a list, not 'a'"),
        (("hotpotqa", ["a"], [["a"]], None, "jaro"), ValueError, "difflib or levenshtein, not 'jaro'"),
    ],
)
def test_what_is_refused(arguments: tuple[Any, ...], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        score(*arguments)
    assert words in str(caught.value)


# ---- the optional packages ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "name"), [("rouge", "gov_report"), ("jieba", "multifieldqa_zh"), ("rapidfuzz", "lcc")]
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    metrics._rouge.cache_clear()
    metrics._segmenter.cache_clear()
    with pytest.raises(ImportError) as caught:
        score(name, ["a"], [["b"]], edit_sim="levenshtein")
    assert f"needs the package {package}: pip install 'lazyllm-engine[longbench]'" in str(caught.value)


def test_another_version_of_rouge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "metadata", SimpleNamespace(version=lambda package: "0.3.2"))
    metrics._rouge.cache_clear()
    with pytest.raises(ImportError, match=r"rouge 1\.0\.1, not 0\.3\.2: pip install"):
        metrics.rouge("a", "b")


def test_import_loads_no_optional_package_and_chinese_prints_nothing() -> None:
    program = """if True:
        import sys
        from lazyllm.evaluation.longbench.scoring import score
        assert not {"rouge", "jieba", "rapidfuzz"} & set(sys.modules)
        assert score("multifieldqa_zh", ["苹果"], [["苹果"]]) == 100.0
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


# ---- a real model's answers --------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> Path:
    default = Path(__file__).resolve().parents[2] / "shared" / "longbench"
    folder = Path(os.environ.get("LAZYLLM_LONGBENCH", default))
    if not (folder / "official_scores.json").is_file():
        pytest.skip(
            f"no recorded answers of LongBench: put pred/*.jsonl and official_scores.json into {default}, "
            "or name their folder in LAZYLLM_LONGBENCH"
        )
    return folder


@pytest.mark.parametrize("edit_sim", ["levenshtein", "difflib"])
@pytest.mark.parametrize("name", PLAIN)
def test_recorded_answers_have_their_official_score(recorded: Path, name: str, edit_sim: str) -> None:
    official = json.loads((recorded / "official_scores.json").read_text())
    lines = (recorded / "pred" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    preds, answers = [row["pred"] for row in rows], [row["answers"] for row in rows]
    expected = official.get(f"{name}|{edit_sim}", official[name])
    assert score(name, preds, answers, rows[-1]["all_classes"], edit_sim) == pytest.approx(expected, abs=1e-9)
