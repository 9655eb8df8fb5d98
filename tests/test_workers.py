"""Runs on several processes, real workers of a Dask cluster, one of them killed: the rows are the same."""

import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import distributed
import numpy as np
import pytest
from folders import SHAPE, model_folder, untimed

import lazyllm
from lazyllm import longbench
from lazyllm.commands.main import main
from lazyllm.evaluation.conditions import conditions_of_methods, conditions_of_model
from lazyllm.evaluation.generated.tasks import GeneratedTasks
from lazyllm.evaluation.options import RulerOptions, RunOptions
from lazyllm.evaluation.results import read_rows
from lazyllm.evaluation.run import checked_settings
from lazyllm.evaluation.trial import planned, scored_answer
from lazyllm.evaluation.workers import Recipe, parts, run_part, worker_model
from lazyllm.policy import View

pytestmark = pytest.mark.usefixtures("no_pictures")
QUIET: dict[str, Any] = {"warm_ups": 0, "progress": False, "wrapper": "none"}
TASK = {"datasets": ["niah_single_1"], "max_length": 560, "tokens": 2}
SETTINGS = [None, {1: 0.5}]


def test_a_killed_worker_loses_and_doubles_nothing(llm: lazyllm.LLM, tmp_path: Path) -> None:
    trace, may_end = tmp_path / "trace", tmp_path / "may end"

    class Slow(lazyllm.Policy):  # a class that workers cannot import
        _files = str(trace), str(may_end)

        def score(self, view: View) -> np.ndarray:
            with open(self._files[0], "a") as file:
                print(os.getpid(), "begins", file=file, flush=True)
                while not os.path.exists(self._files[1]):
                    time.sleep(0.01)
                print(os.getpid(), "ends", file=file, flush=True)
            return np.arange(view.positions.size, dtype=float)

    settings = [Slow({1: 0.5}), {2: 0.5}]
    options: dict[str, Any] = {**TASK, **QUIET, "limit": 6}
    may_end.touch()
    serial = lazyllm.sweep(llm, settings, out=tmp_path / "serial", **options)
    may_end.unlink()
    trace.write_text("")
    killed: list[int] = []

    def kill_one() -> None:
        while not (begun := trace.read_text()).endswith("begins\n"):
            time.sleep(0.01)
        killed.append(int(begun.split()[0]))
        os.kill(killed[0], signal.SIGKILL)
        may_end.touch()

    workers = {"n_workers": 2, "threads_per_worker": 2, "memory_limit": 0, "dashboard_address": ":0"}
    with distributed.LocalCluster(**workers, silence_logs=logging.ERROR) as cluster:
        killer = threading.Thread(target=kill_one, daemon=True)
        killer.start()
        place = {"scheduler": cluster.scheduler_address, "worker_device": "cpu", "worker_threads": 1}
        spread = lazyllm.sweep(llm, settings, out=tmp_path / "spread", **place, **options)
        killer.join()
    assert untimed(spread.rows) == untimed(serial.rows)
    assert [point.setting for point in spread] == [point.setting for point in serial]
    steps = [line.split() for line in trace.read_text().splitlines()]
    assert steps.count([str(killed[0]), "begins"]) == steps.count([str(killed[0]), "ends"]) + 1
    assert len({pid for pid, _ in steps}) >= 2
    (where,) = spread.manifest["environments"].values()
    assert where["threads"] == 1


def test_the_command_runs_on_workers_of_its_own_and_grows(
    llm: lazyllm.LLM, folder: Path, tmp_path: Path, no_bars: None
) -> None:
    call = ["ruler", "--model", str(folder), "--device", "cpu", "--wrapper", "none", "--warm-ups", "1"]
    call += ["--tasks", "niah_single_1", "--lengths", "560", "--pruning", "dense", "--pruning", '{"1": 0.5}']
    out = tmp_path / "run"
    assert main([*call, "--count", "1", "--threads", "1", "--out", str(out)]) == 0
    before = read_rows(out)
    assert main([*call, "--count", "3", "--workers", "2", "--out", str(out)]) == 0
    made = longbench.Run(out)
    assert made.rows[:2] == before
    options = {**QUIET, "warm_ups": 1, "tasks": ["niah_single_1"]}
    serial = longbench.run_ruler(llm, SETTINGS, out=tmp_path / "serial", lengths=[560], count=3, **options)
    assert untimed(made.rows) == untimed(serial.rows)
    here, there = (
        made.manifest["environments"][name] for name in (made.rows[0]["environment"], made.rows[-1]["environment"])
    )
    assert "workers there" not in here
    assert there["workers there"] == 2
    assert there["threads"] == max(1, lazyllm.load(folder, device="cpu").threads // 2)


def test_a_setting_that_cannot_be_sent_is_refused_by_name(llm: lazyllm.LLM, tmp_path: Path) -> None:
    class Locked(lazyllm.Policy):
        def __init__(self, stages: Any) -> None:
            super().__init__(stages)
            self._lock = threading.Lock()

        def score(self, view: View) -> np.ndarray:
            return np.zeros(view.positions.size)

    with pytest.raises(ValueError, match=r"the setting Locked\(\{1: 0.5\}\) cannot be sent to workers: .*lock"):
        lazyllm.sweep(llm, [Locked({1: 0.5})], out=tmp_path / "run", workers=2, **TASK, **QUIET)
    assert not (tmp_path / "run").exists()


def test_wrong_options_and_a_missing_package_are_refused(
    llm: lazyllm.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    for options, words in (
        ({"workers": 0}, "workers must be from 1"),
        ({"workers": 2, "scheduler": "tcp://x:1"}, "give workers, .* or scheduler"),
        ({"worker_threads": 2}, "worker_device and worker_threads are for workers or a scheduler"),
        ({"workers": 2, "worker_threads": 0}, "worker_threads must be from 1"),
        ({"workers": 2, "tasks": ["niah_single_1"]}, r"pip install 'lazyllm-engine\[cluster\]'"),
    ):
        with pytest.raises((ValueError, ImportError), match=words):
            longbench.run_ruler(llm, SETTINGS, out=tmp_path / "run", lengths=[560], **QUIET, **options)
        assert not (tmp_path / "run").exists()


def recipe_and_trials(llm: lazyllm.LLM, count: int, settings: Any = SETTINGS) -> tuple[Recipe, list[Any]]:
    kind = RulerOptions(tasks=["niah_single_1"], lengths=[560], count=count, wrapper="none")
    tasks = GeneratedTasks(llm, kind)
    options = RunOptions(wrapper="none", warm_ups=0, workers=2, worker_threads=1)
    methods = checked_settings(settings)
    expected = {**conditions_of_model(llm, "none", False), **conditions_of_methods(llm, methods, False)}
    recipe = replace(Recipe.of(llm, tasks, scored_answer, options), expected=expected)
    return recipe, [*planned(methods, tasks)]


def test_a_worker_under_other_conditions_is_refused(llm: lazyllm.LLM) -> None:
    same, trials = recipe_and_trials(llm, 1)
    assert not same.tasks.items
    rows, where = run_part(trials, same)
    assert [row["setting"] for row in rows] == ["dense", "{1: 0.5}"]
    assert where["threads"] == 1
    other = replace(same, call="other", expected={**same.expected, "kernels": "abacus"})
    with pytest.raises(ValueError, match=r'the worker on .* has other conditions .*: kernels is "abacus", not "'):
        run_part(trials, other)


def test_a_worker_keeps_its_model(tmp_path: Path) -> None:
    for seed, name in enumerate(("model", "other")):
        model_folder(tmp_path / name, replace(SHAPE, ffn=64, seed=seed))
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "weights": "q4"}
    recipe, trials = recipe_and_trials(lazyllm.load(tmp_path / "model", **options), 1, ["compress:ratio=0.5"])
    assert "error" not in run_part(trials, recipe)[0][0]
    kept = worker_model(recipe)
    assert kept.weights == "q4"
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model" / "model.safetensors")
    assert worker_model(recipe) is kept
    recipe, trials = recipe_and_trials(lazyllm.load(tmp_path / "model", **options), 1, ["compress:ratio=0.5"])
    with pytest.raises(ValueError, match="has other conditions than the run: model sha256 is"):
        run_part(trials, recipe)


def test_parts_are_items_or_single_trials(llm: lazyllm.LLM) -> None:
    _, trials = recipe_and_trials(llm, 3)
    assert [[trial.key.setting for trial in part] for part in parts(trials, 3)] == [["dense", "{1: 0.5}"]] * 3
    assert parts(trials, 4) == [[trial] for trial in trials]
