"""Sweeps: the divergence from dense, spaces, what is written, the Pareto front and the best setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import model_folder

import lazyllm
from lazyllm.forced import forced_logits, greedy_answer
from lazyllm.longbench.divergence import kl_divergence, log_softmax
from lazyllm.longbench.ruler import TASKS as RULER
from lazyllm.longbench.ruler import generate
from lazyllm.longbench.summary import DENSE, Interval
from lazyllm.pruning import Pruning

SPACE = {"stages": [{1: 0.6, 3: 0.3}, {2: 0.9}], "smooth": [1, 3]}
TASKS = {"datasets": ["niah_single_1", "niah_single_2"], "max_length": 420, "limit": 2, "chat": "none"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> lazyllm.LLM:
    return lazyllm.load(model, device="cpu", threads=1)


def sweep(llm: lazyllm.LLM, space: Any, **options: Any) -> lazyllm.Sweep:
    return lazyllm.sweep(llm, space, **{**TASKS, "warm_ups": 0, "progress": False, **options})


@pytest.fixture(scope="module")
def swept(llm: lazyllm.LLM, tmp_path_factory: pytest.TempPathFactory) -> lazyllm.Sweep:
    return sweep(llm, SPACE, out=tmp_path_factory.mktemp("sweep"))


def untimed(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "timing"} for row in rows]


# ---- the divergence ------------------------------------------------------------------------------


def test_divergence_by_hand() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    by_hand = 0.5 * math.log(2) + 0.25 * math.log(1) + 0.25 * math.log(0.5)
    assert kl_divergence(np.log(p), np.log(q)) == pytest.approx(by_hand, rel=1e-14)
    shifted = np.stack([np.log(p) + 300, np.log(q) - 300]), np.log(np.stack([q, p]))
    back = 0.25 * math.log(0.5) + 0.5 * math.log(2)
    assert kl_divergence(*shifted) == pytest.approx([by_hand, back], rel=1e-12)


def test_divergence_goes_from_dense_to_the_setting() -> None:
    p, q = np.log([0.9, 0.1]), np.log([0.5, 0.5])
    assert kl_divergence(p, q) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert kl_divergence(q, p) == pytest.approx(0.5 * math.log(5 / 9) + 0.5 * math.log(5))


def test_divergence_is_in_double_precision_and_never_below_zero() -> None:
    logits = np.random.default_rng(0).normal(0, 4, (50, 300)).astype(np.float32)
    near = np.nextafter(logits, np.float32(99))
    assert log_softmax(logits).dtype == np.float64
    assert (kl_divergence(logits, logits) == 0).all()
    assert (kl_divergence(logits, near) >= 0).all()
    assert kl_divergence(logits, near).max() < 1e-12
    far = np.array([0.0, -2000.0], np.float32)
    assert kl_divergence(far, far) == 0
    assert kl_divergence(np.zeros(2), far) == pytest.approx(1000 - math.log(2))


def test_the_answer_forced_is_the_one_that_dense_generates(llm: lazyllm.LLM) -> None:
    ids = list(range(5, 90))
    answer, logits = greedy_answer(llm.session(), ids, 12, llm.eos_token_ids)
    assert answer == llm.generate(ids, max_new_tokens=12).token_ids
    assert (logits == np.array(list(forced_logits(llm, ids, answer)))).all()
    assert greedy_answer(llm.session(), ids, 12, {answer[3]})[0] == answer[: answer.index(answer[3]) + 1]


def test_divergence_of_a_line_is_that_of_its_logits(llm: lazyllm.LLM, swept: lazyllm.Sweep) -> None:
    setting = Pruning({1: 0.6, 3: 0.3})
    (item,) = generate("niah_single_2", llm.tokenizer, 420, 1, 0)
    ids = llm.tokenizer.encode(RULER["niah_single_2"].template.format(**item))
    answer = llm.generate(ids, max_new_tokens=16).token_ids
    dense, pruned = (np.array(list(forced_logits(llm, ids, answer, one))) for one in (None, setting))
    (row,) = (row for row in swept.rows if (row["setting"], row["item"]) == (str(setting), item["_id"]))
    assert row["forced_tokens"] == len(answer)
    assert row["kl"] == pytest.approx(kl_divergence(dense, pruned).mean())
    assert row["agreement"] == (dense.argmax(1) == pruned.argmax(1)).mean()
    assert row["flops"] == setting.flops(llm.config, len(ids))
    session = llm.session(setting)
    for token in [ids, *([one] for one in answer[:-1])]:
        session.forward(token, generated=token is not ids)
    assert row["computed"] == pytest.approx(session.computed, abs=1e-6)
    assert row["reached_top"] == pytest.approx(session.reached_top, abs=1e-6)


def test_dense_lies_at_zero_and_agrees_with_itself(swept: lazyllm.Sweep) -> None:
    rows = [row for row in swept.rows if row["setting"] == DENSE]
    assert len(rows) == 4
    assert all(row["kl"] == 0 and row["agreement"] == 1 for row in rows)
    assert swept[DENSE].kl == Interval(0, 0, 0)
    assert swept[DENSE].counted_speedup == swept[DENSE].speedup == 1


def test_keeping_all_is_dense_and_pruning_is_not(llm: lazyllm.LLM, swept: lazyllm.Sweep) -> None:
    kept = sweep(llm, [Pruning({1: 1.0})])
    assert [row["kl"] for row in kept.rows] == [0] * 8
    assert all(one.kl.value > 0 for one in swept if one.setting != DENSE)
    strong, weak = swept["Pruning({1: 0.6, 3: 0.3})"], swept["Pruning({2: 0.9})"]
    assert strong.kl.value > weak.kl.value
    assert strong.counted_speedup > weak.counted_speedup > 1


def test_a_sweep_gives_the_same_again(llm: lazyllm.LLM, swept: lazyllm.Sweep) -> None:
    assert untimed(sweep(llm, SPACE).rows) == untimed(swept.rows)
