"""The runner: runs every item under every setting and appends each result to the run's folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.errors import DeviceError
from lazyllm.evaluation.conditions import conditions, contents, environment
from lazyllm.evaluation.manifest import SCORE, new_manifest
from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.results import Key, RunFolder
from lazyllm.evaluation.summary import DENSE
from lazyllm.evaluation.tasks import Prompt, Task, Tasks
from lazyllm.evaluation.token_use import used
from lazyllm.generation import Request
from lazyllm.llm import LLM
from lazyllm.method import Method
from lazyllm.methods import PruningInput, as_method
from lazyllm.pruning import Pruning
from lazyllm.sampling import SamplingParams
from lazyllm.support.progress import bar

WARM_UP_TOKENS, WARM_UP_NEW = 512, 2
MEASURED: Mapping[str, Any] = {"measure": SCORE}
SETTING_WIDTH = 40  # characters, in the progress bar
WARM_UP_TEXT = "The first sentence is short. So is the second."
FAILURES = (ValueError, RuntimeError, ArithmeticError, MemoryError, OSError)
"""Errors of one item that do not end the run; lazyllm's own errors are subclasses of these."""


@dataclass(frozen=True)
class Trial:
    """One item under one setting."""

    key: Key
    task: Task
    item: Mapping[str, Any]
    method: Method


Measure = Callable[[LLM, Tasks, Trial], dict[str, Any]]
"""Runs one trial and returns the fields of its result row, without the key."""


@dataclass(frozen=True)
class Prepared:
    """The prompt of a trial. `whole` is the prompt before compression, which took `compressing` seconds;
    `method` is the setting that the engine runs it with."""

    prompt: Prompt
    whole: Prompt
    method: Method
    compressing: float = 0.0

    @property
    def n_whole(self) -> int:
        return len(self.whole.ids)

    @property
    def share(self) -> float:
        """Prompt tokens left by compression, as a share of the whole prompt."""
        return len(self.prompt.ids) / self.n_whole


def checked_settings(pruning: PruningInput | Sequence[PruningInput]) -> dict[str, Method]:
    """Methods by label; None and "dense" are no pruning."""
    several = pruning if isinstance(pruning, Sequence) and not isinstance(pruning, str) else [pruning]
    made: dict[str, Method] = {}
    for one in several:
        method = as_method(one)
        if (label := label_of(method)) in made:
            raise ValueError(f"the setting {label} is given twice")
        made[label] = method
    if not made:
        raise ValueError("no setting is given; None is dense")
    return made


def label_of(method: Method) -> str:
    return DENSE if method == Pruning() else str(method)


def run_items(
    llm: LLM,
    settings: Mapping[str, Method],
    tasks: Tasks,
    out: Path,
    options: RunOptions,
    measure: Measure | None = None,
    measured: Mapping[str, Any] = MEASURED,
) -> None:
    """Runs the trials that have no row in the folder yet. Each item runs under all settings in turn, so that
    load on the machine affects them alike.

    The default `measure` is `scored_answer`; `measured` describes the measure in the manifest.
    """
    for method in settings.values():
        method.check(llm.config)
    tasks.check(llm)
    rest = {**measured, **tasks.conditions}
    shared = conditions(llm, settings, options.chat, rest, options.progress)
    manifest = new_manifest(llm.config.name or llm.checkpoint.folder.name, shared, tasks.selection)
    here, known = environment(llm, options.warm_ups), contents(tasks.items)
    with RunFolder(out, manifest, known, options.retry_failed) as folder:
        plan, done = list(planned(settings, tasks)), folder.done
        left = [one for one in plan if one.key not in done]
        if left:
            warm_up(llm, tasks, left, options.warm_ups)
        with bar(len(plan), "items", "item", options.progress) as line:
            line.update(len(plan) - len(left))
            for one in left:
                row = result_row(llm, tasks, one, measure or scored_answer)
                folder.append({**row, "content": known[one.key.dataset, one.key.item]}, here)
                line.set_postfix_str(means_so_far(folder.rows, one.key.setting))
                line.update()


def planned(settings: Mapping[str, Method], tasks: Tasks) -> Iterator[Trial]:
    for name, rows in tasks.items.items():
        for item in rows:
            for label, method in settings.items():
                yield Trial(Key(label, name, str(item["_id"])), tasks.task(name), item, method)


def warm_up(llm: LLM, tasks: Tasks, left: Sequence[Trial], runs: int) -> None:
    """Untimed runs: `runs` short dense ones, which page in weights and start threads, then each setting once
    with the whole prompt of its first trial. Models that compress are opened in any case."""
    for method in dict.fromkeys(one.method for one in left):
        if method.compresses:
            method.compress(llm, WARM_UP_TEXT)
    max_tokens = min(WARM_UP_TOKENS, llm.config.context - WARM_UP_NEW)
    for one in islice(cycle(left), runs):
        try:
            ids = tasks.prompt(llm, one.task, one.item).ids[:max_tokens]
        except FAILURES:
            continue  # its trial will fail too, and record the error
        llm.generate(ids, max_new_tokens=WARM_UP_NEW, progress=False)
    first: dict[str, Trial] = {}
    for one in left if runs else ():
        first.setdefault(one.key.setting, one)
    for one in first.values():
        try:
            given = prepared(llm, tasks, one)
            llm.generate(given.prompt.ids, given.method, max_new_tokens=WARM_UP_NEW, progress=False)
        except FAILURES:
            continue


def result_row(llm: LLM, tasks: Tasks, one: Trial, measure: Measure) -> dict[str, Any]:
    """The row of one trial: its measurements, or its error."""
    row: dict[str, Any] = one.key._asdict()
    try:
        return {**row, **measure(llm, tasks, one)}
    except DeviceError:
        raise  # every later trial would fail as well
    except FAILURES as error:
        return {**row, "error": f"{type(error).__name__}: {error}"}


def prepared(llm: LLM, tasks: Tasks, one: Trial) -> Prepared:
    whole = tasks.prompt(llm, one.task, one.item)
    if not one.method.compresses:
        return Prepared(whole, whole, one.method)
    compressing = 0.0

    def shorten(text: str) -> str:
        nonlocal compressing
        begun = time.perf_counter()
        short = one.method.compress(llm, text)
        compressing = time.perf_counter() - begun
        return short

    prompt = tasks.prompt(llm, one.task, one.item, shorten)
    return Prepared(prompt, whole, Pruning(), compressing)


def scored_answer(llm: LLM, tasks: Tasks, one: Trial) -> dict[str, Any]:
    """The default measure: generates an answer and scores it."""
    given = prepared(llm, tasks, one)
    prompt, extra = given.prompt, given.compressing
    stops = tasks.stops(llm, one.task)
    request = Request(
        max_new_tokens=one.task.max_new_tokens,
        sampling=SamplingParams(),
        stop=(),
        trace=False,
        progress=False,
        stop_ids=frozenset(stops.ids),
        never_first=frozenset(stops.never_first),
    )
    session = llm.session(given.method)
    out = session.answer(prompt.ids, request).finished()
    if out.seconds <= 0:
        raise RuntimeError("no token was generated")
    prediction = tasks.prediction(llm, out.text)
    passes = out.passes.reshape(-1, llm.config.n_layers)
    prefill = np.stack([passes[0][name] for name in ("in_play", "computed", "revived")], axis=1)
    return {
        "prediction": prediction,
        "score": tasks.score(one.task, prediction, one.item),
        "length": one.item["length"],
        "prompt_tokens": given.n_whole,
        "cut": prompt.cut,
        "wrapper": prompt.wrapper,
        "flops": one.method.prefill_flops(llm.config, len(prompt.ids), prefill),
        "new_tokens": len(out.token_ids),
        "finished_by": out.finish_reason,
        "computed": round(out.computed * given.share, 6),
        "reached_top": round(out.reached_top * given.share, 6),
        "in_play": changes(passes[0]["in_play"]),
        "used": used(given.method, out, llm.config.n_layers),
        "revived": int(out.passes["revived"].sum()),
        "changed_nothing": changed_nothing(one.method, given, passes["in_play"]),
        "timing": {"ttft": out.ttft + extra, "seconds": out.seconds + extra, "compressing": extra},
    }


def changes(counts: np.ndarray) -> dict[str, int]:
    """Counts by layer, without the layers that have the same count as the layer below."""
    return {str(layer): int(n) for layer, n in enumerate(counts) if layer == 0 or n != counts[layer - 1]}


def changed_nothing(method: Method, given: Prepared, in_play: np.ndarray) -> bool:
    """True if a setting other than dense dropped no token anywhere; `in_play` is (passes, layers)."""
    if method == Pruning():
        return False
    whole = given.prompt.ids == given.whole.ids and method.kept(given.n_whole) == given.n_whole
    return whole and bool((in_play == in_play[:, :1]).all())


def means_so_far(rows: Sequence[Mapping[str, Any]], setting: str) -> str:
    """One setting and the means of its rows, for the progress bar."""
    good = [row for row in rows if row["setting"] == setting and "error" not in row]
    parts = [setting if len(setting) <= SETTING_WIDTH else f"{setting[: SETTING_WIDTH - 1]}…"]
    if times := [row["timing"]["ttft"] for row in good if "timing" in row]:
        parts.append(f"TTFT {np.mean(times):.2f} s")
    if kl := [row["kl"] for row in good if "kl" in row]:
        parts.append(f"KL {np.mean(kl):.4f}")
    if scores := [row["score"] for row in good if "score" in row]:
        parts.append(f"score {100 * np.mean(scores):.1f}")
    return ", ".join(parts)
