"""The runner: asks every item under every setting, measures what comes, and remembers it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm import checked
from lazyllm.errors import DeviceError
from lazyllm.generation import Generation, Request, Stream, answer
from lazyllm.llm import LLM
from lazyllm.longbench.conditions import conditions
from lazyllm.longbench.prompt import Prompt
from lazyllm.longbench.results import Key, RunFolder
from lazyllm.longbench.summary import DENSE
from lazyllm.longbench.tasks import Task, Tasks
from lazyllm.longbench.token_use import used
from lazyllm.methods import Method, PromptCompression, RandomDrop, parse_method
from lazyllm.progress import bar
from lazyllm.pruning import Pruning
from lazyllm.sampling import SamplingParams

Setting = Method | str | None
WARM_UPS, WARM_UP_TOKENS, WARM_UP_NEW = 5, 512, 2
WARM_UP_TEXT = "The first sentence is short. So is the second."
FAILURES = (ValueError, RuntimeError, ArithmeticError, MemoryError, OSError)
"""What may go wrong with one item without ending the run; the errors of lazyllm are among them."""


@dataclass(frozen=True)
class Manner:
    """How a run is done, whatever it asks: untimed runs before the first timed one, whether items that failed
    are asked again, and whether it shows how far it is."""

    warm_ups: int = WARM_UPS
    retry_failed: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        checked.whole(self.warm_ups, "warm_ups", 0)


@dataclass(frozen=True)
class Asked:
    """One item under one setting."""

    key: Key
    task: Task
    item: Mapping[str, Any]
    method: Method


Measure = Callable[[LLM, Tasks, Asked], dict[str, Any]]
"""What a run learns of one item under one setting: the fields of its line beside the key."""


@dataclass(frozen=True)
class Posed:
    """An item as the model is given it, and how many tokens it has as it was. Compressing it, if that is the
    method, took `compressing` seconds."""

    prompt: Prompt
    whole: Prompt
    method: Method
    compressing: float = 0.0

    @property
    def n_whole(self) -> int:
        return len(self.whole.ids)

    @property
    def share(self) -> float:
        """What of the prompt compressing left."""
        return len(self.prompt.ids) / self.n_whole


def checked_settings(pruning: Setting | Sequence[Setting]) -> dict[str, Method]:
    """Settings by how they print; None and "dense" are no pruning at all."""
    several = [pruning] if isinstance(pruning, Setting) or not isinstance(pruning, Sequence) else pruning
    made: dict[str, Method] = {}
    for one in several:
        method = Pruning() if one is None else parse_method(one) if isinstance(one, str) else one
        if not isinstance(method, Method):
            raise TypeError(f"a setting must be a method such as Pruning, its text or None, not {method!r}")
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
    manner: Manner,
    measure: Measure | None = None,
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Does what the folder has not done yet. Settings take turns on each item: all see the same machine.

    `measure` is `scored_answer` unless given; `measured` then says in the manifest what it was.
    """
    for method in settings.values():
        method.check(llm.config)
    tasks.check(llm)
    asked = {**tasks.conditions, **(measured or {}), "warm-up runs": manner.warm_ups}
    told = conditions(llm, settings, tasks.items, asked, manner.progress)
    with RunFolder(out, told, manner.retry_failed) as folder:
        plan = list(planned(settings, tasks))
        left = [one for one in plan if one.key not in folder.done]
        if left:
            warm_up(llm, tasks, left, manner.warm_ups)
        with bar(len(plan), "items", "item", manner.progress) as line:
            line.update(len(plan) - len(left))
            for one in left:
                row = outcome(llm, tasks, one, measure or scored_answer)
                folder.append(row)
                line.set_postfix(so_far(folder.rows))
                line.update()


def planned(settings: Mapping[str, Method], tasks: Tasks) -> Iterator[Asked]:
    for name, rows in tasks.items.items():
        for item in rows:
            for label, method in settings.items():
                yield Asked(Key(label, name, str(item["_id"])), tasks.task(name), item, method)


def warm_up(llm: LLM, tasks: Tasks, left: Sequence[Asked], runs: int) -> None:
    """Pages in weights, wakes threads, chooses kernels, opens the models that compress: what only the first
    runs pay."""
    for method in dict.fromkeys(one.method for one in left):
        if isinstance(method, PromptCompression):
            method.compress(llm, WARM_UP_TEXT)
    most = min(WARM_UP_TOKENS, llm.config.context - WARM_UP_NEW)
    for one in islice(cycle(left), runs):
        try:
            ids = tasks.prompt(llm, one.task, one.item).ids[:most]
        except FAILURES:
            continue  # its own line will say so
        llm.generate(ids, max_new_tokens=WARM_UP_NEW, progress=False)


def outcome(llm: LLM, tasks: Tasks, one: Asked, measure: Measure) -> dict[str, Any]:
    """The line of one item: a result, or what went wrong."""
    row: dict[str, Any] = one.key._asdict()
    try:
        return {**row, **measure(llm, tasks, one)}
    except DeviceError:
        raise  # nothing that follows would run
    except FAILURES as error:
        return {**row, "error": f"{type(error).__name__}: {error}"}


def posed(llm: LLM, tasks: Tasks, one: Asked) -> Posed:
    whole = tasks.prompt(llm, one.task, one.item)
    if not isinstance(one.method, PromptCompression):
        return Posed(whole, whole, one.method)
    begun = time.perf_counter()
    item = {**one.item, "context": one.method.compress(llm, one.item["context"])}
    compressing = time.perf_counter() - begun
    return Posed(tasks.prompt(llm, one.task, item), whole, Pruning(), compressing)


def scored_answer(llm: LLM, tasks: Tasks, one: Asked) -> dict[str, Any]:
    """The measure of a benchmark: an answer is generated and scored."""
    given = posed(llm, tasks, one)
    prompt, extra = given.prompt, given.compressing
    request = Request(
        max_new_tokens=one.task.max_new_tokens,
        sampling=SamplingParams(),
        stop=(),
        trace=False,
        progress=False,
        stop_ids=tasks.stop_ids(llm, one.task),
    )
    session = llm.session(given.method)
    out = Stream(answer(session, session.given(prompt.ids, chat=False), request)).finished()
    if out.seconds <= 0:
        raise RuntimeError("no token was generated")
    prediction = tasks.prediction(llm, out.text)
    return {
        "prediction": prediction,
        "score": tasks.score(one.task, prediction, one.item),
        "length": one.item["length"],
        "prompt_tokens": given.n_whole,
        "cut": prompt.cut,
        "wrapper": prompt.wrapper,
        "flops": prefill_flops(llm, one.method, len(prompt.ids), passes_of(prefill_of(out))),
        "new_tokens": len(out.token_ids),
        "finished_by": out.finish_reason,
        "computed": round(out.computed * given.share, 6),
        "reached_top": round(out.reached_top * given.share, 6),
        "in_play": in_play(out),
        "used": used(given.method, out, llm.config.n_layers),
        "revived": int(out.passes["revived"].sum()),
        "changed_nothing": changed_nothing(one.method, given, in_play_of(out, llm.config.n_layers)),
        "timing": {"ttft": out.ttft + extra, "seconds": out.seconds + extra, "compressing": extra},
    }


def prefill_of(out: Generation) -> np.ndarray:
    first: np.ndarray = out.passes[out.passes["pass_"] == 0]
    return first


def passes_of(rows: np.ndarray) -> np.ndarray:
    """As `Session.last_pass` has them."""
    return np.stack([rows[name] for name in ("in_play", "computed", "revived")], axis=1)


def prefill_flops(llm: LLM, method: Method, n_prompt: int, first_pass: np.ndarray) -> int | None:
    """Counted operations before the first token; None where compressing adds what is not counted."""
    if isinstance(method, PromptCompression):
        return None
    if isinstance(method, Pruning):
        return method.pass_flops(llm.config, first_pass)
    return method.flops(llm.config, n_prompt)


def in_play(out: Generation) -> dict[str, int]:
    """Tokens in play in the first pass, at each layer where they change."""
    counts = prefill_of(out)["in_play"]
    return {str(layer): int(n) for layer, n in enumerate(counts) if layer == 0 or n != counts[layer - 1]}


def in_play_of(out: Generation, n_layers: int) -> np.ndarray:
    """(passes, layers)"""
    in_play: np.ndarray = out.passes["in_play"].reshape(-1, n_layers)
    return in_play


def changed_nothing(method: Method, given: Posed, in_play: np.ndarray) -> bool:
    """A setting that took no token out of any layer in any pass, of which `in_play` is (passes, layers): its
    result is dense's."""
    if method == Pruning():
        return False
    if isinstance(method, PromptCompression):
        return given.prompt.ids == given.whole.ids
    n_kept = method.kept(given.n_whole) if isinstance(method, RandomDrop) else given.n_whole
    return n_kept == given.n_whole and bool((in_play == in_play[:, :1]).all())


def so_far(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """For the progress bar."""
    good = [row for row in rows if "error" not in row]
    told: dict[str, str] = {}
    if not good:
        return told
    if "timing" in good[0]:
        told["TTFT"] = f"{float(np.mean([row['timing']['ttft'] for row in good])):.2f} s"
    if "kl" in good[0]:
        told["KL"] = f"{float(np.mean([row['kl'] for row in good])):.4f}"
    if "score" in good[0]:
        told["score"] = f"{100 * float(np.mean([row['score'] for row in good])):.1f}"
    return told
