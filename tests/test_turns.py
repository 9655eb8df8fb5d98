"""Several questions about one text, in turn and each alone; parts of a text to be repeated; their scores."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folders import SHAPE

import lazyllm
from lazyllm import longbench
from lazyllm.evaluation.generated.quotes import quote_score
from lazyllm.evaluation.generated.ruler import TURNS
from lazyllm.evaluation.generated.tasks import ALONE, IN_TURN, TASKS, generate
from lazyllm.evaluation.report import turns_table
from lazyllm.evaluation.summary import Summary
from lazyllm.pictures.panels import plot_turns

pytestmark = pytest.mark.usefixtures("no_pictures")
QUIET: dict[str, Any] = {"warm_ups": 0, "progress": False, "wrapper": "none"}
MODEL = replace(SHAPE, context=2000)  # room for all turns
PRUNED = {1: 0.5, 2: 0.4}


def test_scores_of_a_quote() -> None:
    part = "one\n  two\nthree\nfour"
    for prediction, score in (
        ("Here it is:\n```\none\ntwo\nthree\nfour\n```", 1),
        ("one\nthree", 0.5),
        ("four\nthree\ntwo\none", 0.25),  # in their order
        ("one two three four", 0),
        ("", 0),
    ):
        assert quote_score(prediction, [part])["score"] == score
    assert 0.8 < quote_score("one\n  two\nthree\nfive", [part])["similarity"] < 1
    assert quote_score(part + "\nand so on, and so on", [part])["similarity"] == 1


def test_a_run_asks_in_turn_and_alone(llm: lazyllm.LLM, tmp_path: Path) -> None:
    asked = {"tasks": [IN_TURN, ALONE], "lengths": [600], "count": 1, **QUIET}
    run = longbench.run_ruler(llm, [None, PRUNED], out=tmp_path, **asked)
    assert not run.summary.failed
    (item,) = generate(IN_TURN, lambda text, prefix: llm.tokenizer.encode(text + prefix), 600, 1, 0)
    text = TASKS[IN_TURN].template.format(**item).removesuffix(item["input"])
    questions = [turn["input"] for turn in item["turns"]]
    options: Any = {"max_new_tokens": TASKS[IN_TURN].max_new_tokens, "progress": False}
    for row in run.rows:
        setting = None if row["setting"] == "dense" else PRUNED
        if row["dataset"].startswith(ALONE):
            answers = [llm.generate(text + question, setting, **options) for question in questions]
        else:
            session = llm.session(setting)
            prompts = [text + questions[0], *(f"\n\n{question}" for question in questions[1:])]
            answers = [session.ask(prompt, **options) for prompt in prompts]
        assert [turn["prediction"] for turn in row["turns"]] == [answer.text for answer in answers]
        assert [turn["depth"] for turn in row["turns"]] == [turn["depth"] for turn in item["turns"]]
        assert row["score"] == sum(turn["score"] for turn in row["turns"]) / TURNS
        revived = [int(answer.passes["revived"].sum()) for answer in answers]
        if setting is None:
            assert not any(turn["revived"] for turn in row["turns"])
        elif row["dataset"].startswith(IN_TURN):
            assert [turn["revived"] for turn in row["turns"]] == revived
            assert any(revived[1:])
    longbench.run_ruler(llm, [None, PRUNED], out=tmp_path, **asked)
    assert len(longbench.Run(tmp_path).rows) == len(run.rows)  # nothing runs twice


def test_turns_need_a_wrapper_that_can_go_on(llm: lazyllm.LLM, tmp_path: Path) -> None:
    asked = {"tasks": [IN_TURN], "lengths": [600], "count": 1, **QUIET, "wrapper": "llama-2"}
    run = longbench.run_ruler(llm, out=tmp_path, **asked)
    (row,) = run.summary.failed
    assert "turns need the wrapper none or template, not llama-2" in row["error"]


def test_the_report_has_turns_by_number_and_depth(llm: lazyllm.LLM, tmp_path: Path) -> None:
    asked = {"tasks": [IN_TURN, "quote_lines"], "lengths": [1000], "count": 2, **QUIET}
    run = longbench.run_ruler(llm, [None, PRUNED], out=tmp_path, **asked)
    rows = [row for row in run.rows if "turns" in row]
    for number, row in enumerate(rows):
        for place, turn in enumerate(row["turns"]):
            turn["score"] = float(number == place)
    summary = Summary(rows, lambda name: "Turns")
    table = turns_table(summary)
    assert [row[3:8] for row in table.rows] == [
        ["50.00", "0.00", "50.00", "0.00", "0.00"],
        ["0.00", "50.00", "0.00", "50.00", "0.00"],
    ]
    assert (tmp_path / "turns.csv").exists()
    assert all("similarity" in row for row in run.rows if row["dataset"].startswith("quote"))


def test_the_picture_has_a_panel_for_each_data_set(tmp_path: Path, no_pictures: Callable[[], None]) -> None:
    no_pictures()
    panels = {name: {"dense": [100.0, 50.0], "2x": [90.0, 40.0]} for name in ("a", "b", "c")}
    assert plot_turns(panels, "dense", tmp_path / "turns.png").stat().st_size > 10_000
