"""The prompts of a search in the order in which they are run, and dense's answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from lazyllm.calibration.prompts import CURVE_SEED, FOR_CURVES, CalibrationTasks, encoded
from lazyllm.evaluation.divergence import kl_divergence
from lazyllm.evaluation.options import RunOptions
from lazyllm.evaluation.teacher_forcing import forced_logits, greedy_answer
from lazyllm.llm import LLM
from lazyllm.prompt import Prompt
from lazyllm.pruning import Pruning
from lazyllm.support.files import whole_file
from lazyllm.support.progress import bar

LEAST = 3  # prompts, for a paired test


@dataclass(frozen=True)
class Reference:
    """Dense's greedy answer to a prompt."""

    prompt: Sequence[int]
    answer: list[int]
    logits: np.ndarray  # (tokens, vocab), before each token of the answer


@dataclass(frozen=True)
class Result:
    """A setting on one prompt: the divergence from dense in nats per token, mean over dense's answer; and
    whether greedy decoding gives the same answer."""

    kl: float
    same: bool


def prompts_of(llm: LLM, given: Sequence[Prompt] | None, tokens: int) -> list[list[int]]:
    """Token ids of the user's prompts, or of generated needles: of all kinds and lengths in turn, so that
    the first few are a fair sample."""
    if isinstance(given, str):
        raise TypeError("prompts must be a list of prompts, not one text")
    if given is not None:
        if len(given) < LEAST:
            raise ValueError(
                f"prompts must be at least {LEAST}, not {len(given)}; settings are compared by them"
            )
        return list(encoded(llm, given, tokens).values())
    tasks = CalibrationTasks(llm, {}, FOR_CURVES, CURVE_SEED, RunOptions())
    by_kind = [
        [tasks.prompt(llm, tasks.task(name), item).ids for item in items]
        for name, items in tasks.items.items()
    ]
    return [ids for ids in chain.from_iterable(zip_longest(*by_kind)) if ids]


class References:
    """Dense's answers, of at most `tokens` tokens; computed once and kept in the folder."""

    def __init__(
        self, llm: LLM, prompts: Sequence[Sequence[int]], tokens: int, folder: Path, progress: bool
    ) -> None:
        self._prompts, self._folder = prompts, folder
        folder.mkdir(exist_ok=True)
        left = [number for number in range(len(prompts)) if not self._file(number).exists()]
        with bar(len(left), "dense", "prompt", progress and bool(left)) as line:
            for number in left:
                self._write(number, *greedy_answer(llm.session(), prompts[number], tokens, llm.eos_token_ids))
                line.update()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, number: int) -> Reference:
        with np.load(self._file(number)) as file:
            return Reference(self._prompts[number], file["answer"].tolist(), file["logits"])

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.npz"

    def _write(self, number: int, answer: list[int], logits: np.ndarray) -> None:
        with whole_file(self._file(number)) as file:
            np.savez(file, answer=np.array(answer), logits=logits)


def measured(llm: LLM, pruning: Pruning, reference: Reference) -> Result:
    passes = forced_logits(llm, reference.prompt, reference.answer, pruning)
    logits = np.array(list(passes))
    kl = float(kl_divergence(reference.logits, logits).mean())
    return Result(kl, bool((logits.argmax(axis=1) == reference.answer).all()))
