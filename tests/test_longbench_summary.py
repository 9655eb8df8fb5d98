"""Summaries of runs: means, intervals, paired differences, tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyllm.evaluation import report
from lazyllm.evaluation.summary import NO_SPEED, Speed, Summary, interval, student_t, token_use
from lazyllm.pictures.quality import Dot, plot_scores
from lazyllm.support.tables import Table


def test_token_use_is_the_mean_over_items() -> None:
    rows = [
        {"used": {"0": [10, 10, 10], "4": [2, 3, 5]}, "new_tokens": 3, "prompt_tokens": 10},
        {"used": {"0": [20], "2": [10]}, "new_tokens": 1, "prompt_tokens": 20},
    ]
    shares = token_use(rows)
    assert list(shares) == [0, 2, 4]
    np.testing.assert_allclose(shares[0], [1, 1, 1])
    np.testing.assert_allclose(shares[2], [0.75, 0.75, 0.75])  # the first item's layer 2 is like its layer 0
    np.testing.assert_allclose(shares[4], [(0.2 + 0.5) / 2, (0.3 + 0.5) / 2, (0.5 + 0.5) / 2])


def row(
    setting: str, name: str, number: int | str, score: float, ttft: float, environment: str = "here"
) -> dict[str, Any]:
    return {
        "setting": setting,
        "dataset": name,
        "item": str(number),
        "score": score,
        "computed": 1.0,
        "reached_top": 1.0,
        "changed_nothing": False,
        "environment": environment,
        "timing": {"ttft": ttft, "seconds": 2 * ttft},
    }


def test_summary_by_hand() -> None:
    rows = []
    for number, (dense, pruned) in enumerate([(0.5, 0.25), (1.0, 0.5)]):
        rows += [row("dense", "lcc", number, dense, 4.0), row("p", "lcc", number, pruned, 1.0 + number)]
    rows += [row("dense", "trec", 0, 1.0, 6.0), row("p", "trec", 0, 1.0, 2.0)]
    assert np.isnan(Summary(rows, {"lcc": "code", "trec": "few"}.__getitem__).mean("p").low)  # of one item
    rows += [row("dense", "trec", 1, 1.0, 6.0), row("p", "trec", 1, 1.0, 2.0)]
    summary = Summary(rows, {"lcc": "code", "trec": "few"}.__getitem__)
    assert summary.score("dense", "lcc") == 75.0
    assert summary.score("p", "lcc") == 37.5
    assert summary.mean("p").value == pytest.approx((37.5 + 100) / 2)
    difference = summary.difference("p")
    assert difference.value == pytest.approx(-37.5 / 2)
    assert difference.low < difference.value < difference.high  # one degree of freedom: wide
    assert difference.low - difference.value == pytest.approx(-12.706 * 6.25, abs=0.01)
    speed = summary.speed("p", "ttft")
    assert speed.of_sums == pytest.approx(20 / 7)
    assert speed.median == pytest.approx(3.0)


def test_times_by_hand() -> None:
    slow = [("dense", 4.0, n) for n in range(3)] + [("p", 2.0, n) for n in range(3)]
    fast = [("dense", 1.0, 0), ("p", 0.25, 0), ("q", 0.5, 1), ("r", 0.5, 0)]
    rows = [
        row(setting, "lcc", number, 1.0, ttft, environment)
        for environment, timed in (("slow", slow), ("fast", fast))
        for setting, ttft, number in timed
    ]
    summary = Summary(rows, lambda name: "code")
    assert summary.environments == ["slow", "fast"]
    assert len(summary.rows) == 8  # the two doubles count once
    assert summary.score("p", "lcc") == 100
    speeds = {setting: summary.speed(setting, "ttft") for setting in "pqr"}
    # dense was timed on the item of q elsewhere
    assert speeds == {"p": Speed(2.0, 2.0), "q": NO_SPEED, "r": Speed(2.0, 2.0)}
    assert [row["timing"]["ttft"] for row in summary.timed("p") + summary.timed("q")] == [2.0] * 3 + [0.5]
    states = {"slow": {"warm-up runs": 0}, "fast": {"warm-up runs": 5}}
    assert report.warmth(summary, states) == "cold or warm, after 5 short runs and one of each setting"


SPREADS = {
    "one data set": [[1]],
    "a category": [[1, 1, 1]],
    "an uneven category": [[1, 2, 4]],
    "six categories": [[1, 1, 1], [2, 2, 2], [1, 1, 1], [3, 1, 1], [1, 1], [1, 1]],
}


@pytest.mark.parametrize("items", [2, 3, 20])
@pytest.mark.parametrize("name", SPREADS)
def test_intervals_hold_the_mean_95_times_in_100(name: str, items: int) -> None:
    """The standard deviation of each data set of each category is given; the mean is 0."""
    random, spreads, n_hits, n_trials = np.random.default_rng(0), SPREADS[name], 0, 1000
    for _ in range(n_trials):
        groups = [[spread * random.standard_normal(items) for spread in category] for category in spreads]
        made = interval(groups)
        n_hits += made.low <= 0 <= made.high
    assert n_hits / n_trials == pytest.approx(0.95, abs=0.02)


def test_intervals_by_hand() -> None:
    bounds = interval([[np.array([4.0, 6.0])]])  # standard error 1, one degree of freedom
    assert bounds == pytest.approx((5, 5 - 12.706, 5 + 12.706), abs=1e-3)
    bounds = interval([[np.array([3.0, 5.0, 7.0])]], low=1.0)  # standard error 1.1547, two degrees
    assert bounds == pytest.approx((5, 1.0, 5 + 1.1547 * 4.3027), abs=1e-3)
    quantiles = [student_t(freedom) for freedom in (4, 9, 30, 1000)]
    assert quantiles == pytest.approx([2.7764, 2.2622, 2.0423, 1.9623], abs=1e-4)
    assert np.isnan(interval([[np.array([3.0, 7.0])], [np.array([5.0])]]).low)


def test_the_value_lies_in_its_interval_even_where_all_items_agree(tmp_path: Path) -> None:
    for scores in ({"a": 2 / 3}, {"a": 0.1}, {"a": 1.0, "b": 1.0, "c": 0.0}):
        rows = [row("dense", name, n, score, 1.0) for name, score in scores.items() for n in range(3)]
        mean = Summary(rows, str.upper).mean("dense")
        assert mean.low <= mean.value <= mean.high
        dot = Dot("dense", 1.0, mean.value, mean.low, mean.high)
        assert plot_scores([dot], "dense", tmp_path / "scores.png", "a model").exists()


def test_means_are_of_unrounded_scores_and_differences_of_the_items_that_both_have() -> None:
    rows = [row("dense", "lcc", number, float(number < 2), 1.0) for number in range(3)]
    rows += [row("p", "lcc", number, float(number < 1), 1.0) for number in range(3)]
    summary = Summary(rows, lambda name: "code")
    difference = summary.difference("p")
    assert summary.mean("p").value - summary.mean("dense").value == pytest.approx(difference.value, abs=1e-9)
    cells = {line[0]: line[1:] for line in report.scores_table(summary).rows}
    assert cells["lcc"] == ["66.67", "33.33"]
    assert cells["paired difference to dense [95 %]"][1].startswith("-33.33 ")
    rows[-1] = {"setting": "p", "dataset": "lcc", "item": "2", "error": "ValueError: too long"}
    summary = Summary(rows, lambda name: "code")
    assert summary.difference("p").value == pytest.approx(-50)
    assert report.scores_table(summary).rows[-2:] == [["items", "3", "2"], ["items paired", "3", "2"]]


def test_longbench_e_and_generated_tasks_have_a_mean_by_length() -> None:
    rows = [
        {**row("dense", name, str(length), score, 1.0), "length": length}
        for name, lengths in [
            ("qasper_e", {3999: 0.25, 1000: 0.75, 4000: 0.25, 7999: 0.75, 8000: 1.0}),
            ("qasper", {100: 0.1}),
        ]
        for length, score in lengths.items()
    ]
    table = report.lengths_table(Summary(rows, lambda name: "QA"))
    means = {"0-4k": "50.00", "4-8k": "50.00", "8k+": "100.00"}
    assert dict(table.rows) == {f"qasper_e, {words} words": score for words, score in means.items()}
    scores = {"vt@400": 0.5, "cwe@400": 1.0, "vt@800": 0.25}
    rows = [{**row("dense", name, "1", score, 1.0), "length": 400} for name, score in scores.items()]
    table = report.lengths_table(Summary(rows, lambda name: "task"))
    assert table.rows == [["400 tokens", "75.00"], ["800 tokens", "25.00"]]


def test_a_table_as_text_is_aligned_and_wraps_long_heads() -> None:
    long = "Pruning({9: 0.4625, 15: 0.2139, 22: 0.0989}, smooth=13)"
    table = Table("Scores", ["data set", long], [["mean", "1.00"], ["qasper", "10.25"]])
    lines = table.text().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert max(map(len, lines)) <= 8 + 2 + 20
    assert lines[-2].split() == ["mean", "1.00"]
    assert "".join(line[10:].strip() for line in lines[:-2]).replace(" ", "") == long.replace(" ", "")
    assert Table("none", ["a", "b"], []).text() == "a  b"
    assert Table("cells", ["a|b"], [["<c>"]]).html().count("&lt;c&gt;") == 1
