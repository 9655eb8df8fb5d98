"""Trial: one item under one setting; how it is warmed up, run and measured."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from statistics import fmean
from typing import Any

import numpy as np

from lazyllm.document import JOINT
from lazyllm.errors import CheckpointError, DeviceError
from lazyllm.evaluation.results import Key
from lazyllm.evaluation.tasks import ItemPrompt, Tasks
from lazyllm.generation import Generation, Request
from lazyllm.llm import LLM
from lazyllm.method import Method
from lazyllm.prefix_cache import PrefixCache
from lazyllm.pruning import Pruning
from lazyllm.session import Session

WARM_UP_TOKENS, WARM_UP_NEW = 512, 2
WARM_UP_TEXT = "The first sentence is short. So is the second."
FAILURES = (ValueError, RuntimeError, ArithmeticError, MemoryError)
"""Errors of one item, a prompt that needs too much memory among them; they do not end the run."""
BREAKS = (CheckpointError, DeviceError)
"""The FAILURES that come from the model or the machine, like OSError: every later trial would fail too."""


@dataclass(frozen=True)
class Trial:
    """One item under one setting."""

    key: Key
    item: Mapping[str, Any]
    method: Method


Measure = Callable[[LLM, Tasks, Trial], dict[str, Any]]
"""Runs one trial and returns the fields of its result row, without the key."""


def planned(settings: Mapping[str, Method], tasks: Tasks) -> Iterator[Trial]:
    """The trials in running order: each item under all settings in turn."""
    for name, items in tasks.items.items():
        for item in items:
            for label, method in settings.items():
                yield Trial(Key(label, name, str(item["_id"])), item, method)


def warm_up(llm: LLM, tasks: Tasks, trials: Sequence[Trial], runs: int) -> None:
    """Untimed runs: `runs` short dense ones, which page in weights and start threads, then each setting once
    with the whole prompt of its first trial. Models that compress are opened in any case. An item that fails
    is left to its trial, which will record the error."""
    for method in dict.fromkeys(trial.method for trial in trials):
        if method.compresses:
            method.compress(llm, WARM_UP_TEXT)
    if not runs:
        return

    def answer(n_tokens: int, llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
        ready = prepared(llm, tasks, trial)
        llm.generate(ready.prompt.ids[:n_tokens], ready.method, max_new_tokens=WARM_UP_NEW, progress=False)
        return {}

    context = llm.config.context
    short = partial(answer, min(WARM_UP_TOKENS, context - WARM_UP_NEW))
    for trial in islice(cycle(trials), runs):
        result_row(llm, tasks, replace(trial, method=Pruning()), short)
    first: dict[str, Trial] = {}
    for trial in trials:
        if first.setdefault(trial.key.setting, trial) is trial:
            result_row(llm, tasks, trial, partial(answer, context))


def result_row(llm: LLM, tasks: Tasks, trial: Trial, measure: Measure) -> dict[str, Any]:
    """The row of one trial: its measurements, or its error."""
    try:
        return {**trial.key._asdict(), **measure(llm, tasks, trial)}
    except BREAKS:
        raise
    except FAILURES as error:
        return {**trial.key._asdict(), "error": f"{type(error).__name__}: {error}"}


@dataclass(frozen=True)
class Prepared:
    """The prompt of a trial. `whole` is the prompt before compression, which took `compressing` seconds;
    `method` is the setting that the engine runs it with."""

    prompt: ItemPrompt
    whole: ItemPrompt
    method: Method
    compressing: float = 0.0

    def row(
        self,
        llm: LLM,
        trial: Trial,
        counts: np.ndarray,
        use: Session | Generation,
        seconds: Sequence[float],
        dropped: bool,
    ) -> dict[str, Any]:
        """Fields of the row of any measure. `counts` are those of `Session.last_pass` after the prompt;
        `seconds` are those to the first token and to the end; `dropped`: the engine has dropped a token."""
        n_whole, ids = len(self.whole.ids), self.prompt.ids
        kept_all = ids == self.whole.ids and trial.method.kept(n_whole) == n_whole
        ttft, total = (taken + self.compressing for taken in seconds)
        return {
            "prompt_tokens": n_whole,
            "cut": self.prompt.cut,
            "wrapper": self.prompt.wrapper,
            "pruning": str(use.pruning),  # the setting for this prompt
            "flops": use.pruning.prefill_flops(llm.config, len(ids), counts),
            # of the whole prompt, of which compression left a share
            "computed": round(use.computed * len(ids) / n_whole, 6),
            "reached_top": round(use.reached_top * len(ids) / n_whole, 6),
            # dense is meant to drop no token
            "changed_nothing": trial.method != Pruning() and kept_all and not dropped,
            "timing": {"ttft": ttft, "seconds": total, "compressing": self.compressing},
        }


def prepared(llm: LLM, tasks: Tasks, trial: Trial) -> Prepared:
    whole, method, seconds = tasks.prompt(llm, trial.key.dataset, trial.item), trial.method, 0.0
    if not method.compresses:
        return Prepared(whole, whole, method)

    def shorten(text: str) -> str:
        nonlocal seconds
        start = time.perf_counter()
        short = method.compress(llm, text)
        seconds = time.perf_counter() - start
        return short

    prompt = tasks.prompt(llm, trial.key.dataset, trial.item, shorten)
    return Prepared(prompt, whole, method.without_compression(), seconds)


def scored_answer(llm: LLM, tasks: Tasks, trial: Trial) -> dict[str, Any]:
    """The default measure: generates an answer and scores it; of an item with turns, one for each."""
    name = trial.key.dataset
    request = tasks.request(llm, name)
    if "turns" in trial.item:
        return scored_turns(llm, tasks, trial, request)
    ready = prepared(llm, tasks, trial)
    answer = llm.session(ready.method).answer(ready.prompt.ids, request).finished()
    prediction = tasks.prediction(llm, answer.text)
    scores = tasks.score(name, prediction, trial.item)
    return {"prediction": prediction, **scores, **answer_row(llm, trial, ready, answer)}


def answer_row(llm: LLM, trial: Trial, ready: Prepared, answer: Generation) -> dict[str, Any]:
    """Fields of a row about the cost of an answer. `used` has, by layer, the number of prompt tokens computed by
    each new token; None if generated tokens are pruned, as revived tokens may then be generated ones."""
    passes = answer.passes.reshape(-1, llm.config.n_layers)
    counts = np.stack([passes[0][name] for name in ("in_play", "computed", "revived")], axis=-1)
    computed = passes["computed"].copy()
    computed[1:] -= 1  # a decode step computes its own token in every layer
    prunes_generated = (answer.pruning.core() or {}).get("prune_generated")
    return {
        "length": trial.item["length"],
        **ready.row(llm, trial, counts, answer, (answer.ttft, answer.seconds), not answer.unpruned),
        "new_tokens": len(answer.token_ids),
        "finished_by": answer.finish_reason,
        "in_play": by_layer(passes[0]["in_play"]),
        "used": None if prunes_generated else by_layer(computed.cumsum(axis=0).T),
        "revived": int(passes["revived"].sum()),
    }


def by_layer(counts: np.ndarray) -> dict[str, Any]:
    """Counts by layer, but for layers equal to the one below: {"0": 9, "2": 4} for [9, 9, 4]."""
    return {
        str(layer): row.tolist() for layer, row in enumerate(counts) if layer == 0 or (row != counts[layer - 1]).any()
    }


def scored_turns(llm: LLM, tasks: Tasks, trial: Trial, request: Request) -> dict[str, Any]:
    """The mean score of the turns, the fields of each turn, and the cost of the first. Turns follow each other in
    one session; or each is asked alone, about a text that is read once where the setting allows it."""
    name, method, alone = trial.key.dataset, trial.method, trial.item["alone"]
    whole = tasks.prompt(llm, name, trial.item)
    if whole.wrapper not in ("none", "template"):
        raise ValueError(f"turns need the wrapper none or template, not {whole.wrapper}")
    request = replace(request, chat=whole.wrapper == "template")
    prefixes = PrefixCache() if alone and method.reads_in_parts else None
    turns: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    for text, question in zip(tasks.turns(name, trial.item), trial.item["turns"], strict=True):
        if alone or not turns:
            session = llm.session(method, prefixes)
        elif not request.chat:
            text = JOINT + text
        answer = session.answer(text, request).finished()
        first = first or answer_row(llm, trial, Prepared(whole, whole, method), answer)
        prediction = tasks.prediction(llm, answer.text)
        turns.append(
            {
                "prediction": prediction,
                **tasks.score(name, prediction, question),
                "depth": question["depth"],
                "ttft": answer.ttft,
                "seconds": answer.seconds,
                "revived": int(answer.passes["revived"].sum()),
                "computed": round(answer.computed, 6),
            }
        )
    score = fmean(turn["score"] for turn in turns)
    return {"prediction": turns[0]["prediction"], "score": score, "turns": turns, **first}
