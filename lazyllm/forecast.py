"""Forecast: how long answers take on this machine, dense and pruned; resolves `min_tokens="auto"`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np

from lazyllm import _core
from lazyllm.machine.info import processor
from lazyllm.machine.profile import Costs, Habits, Point, Profile, ProfileFile, fitted_revival
from lazyllm.model import Model
from lazyllm.pruning import DENSE, Drop, Mass, Pruning, Stages, largest_keep
from lazyllm.session import Session
from lazyllm.support.progress import bar

LONGEST, SHARES = 768, (16, 4, 1)  # the prefills that are timed have LONGEST tokens over each of these
ROUNDS = 3
STEPS = 8  # timed after each prefill
TEXTS, TEXT = 2, 96  # the model's own texts, and the tokens of each
HABIT_STEPS = 32
COST_RUNS, HABIT_RUNS = TEXTS + ROUNDS * len(SHARES), 1 + TEXTS
PER_OCTAVE = 8  # prompt lengths tried between one and its double
TITLE = 'measuring this machine for min_tokens="auto"'
DENSE_HABITS = Habits(revival=0.0, overhead=0.0)


class Forecast:
    """Predictions for one model. What they need is measured when needed first, and kept in the cache."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._config = model.config
        self._profile: Profile | None = None
        self._resolved: dict[tuple[Pruning, int], int] = {}

    def min_tokens(self, pruning: Pruning, n_new: int, progress: bool = True) -> int:
        """The least prompt length from which on answers of `n_new` tokens are faster pruned than dense.

        0 if all are, and one more than the model's context if none is.
        """
        setting = replace(pruning, min_tokens=0)
        if not setting.stages:
            return 0
        if (setting, n_new) not in self._resolved:
            costs, habits = self._known(setting, progress)
            least = self._config.context + 1
            for n in reversed(self._lengths()):
                dense, pruned = self._both(costs, habits, setting, n, n_new)
                if pruned >= dense:
                    break
                least = n
            self._resolved[setting, n_new] = least if least > 1 else 0
        return self._resolved[setting, n_new]

    def speedup(self, pruning: Pruning, n_prompt: int, n_new: int) -> float:
        """The predicted seconds of a dense answer over those of a pruned one, whatever the `min_tokens`."""
        setting = replace(pruning, min_tokens=0)
        dense, pruned = self._both(*self._known(setting, progress=True), setting, n_prompt, n_new)
        return dense / pruned

    def _both(
        self, costs: Costs, habits: Habits, setting: Pruning, n_prompt: int, n_new: int
    ) -> tuple[float, float]:
        """Seconds of the dense answer and of the pruned one."""
        dense = self._seconds(costs, DENSE_HABITS, DENSE, n_prompt, n_new)
        return dense, self._seconds(costs, habits, setting, n_prompt, n_new)

    def _seconds(self, costs: Costs, habits: Habits, setting: Pruning, n_prompt: int, n_new: int) -> float:
        """The prefill; what the answer revives of the work that the prefill left out, at the same price; and
        the decode steps, each with the keys that it reads."""
        steps = n_new - 1
        counted = replace(setting, stages=_with_keeps(setting.stages, habits.kept))
        dense, pruned = (one.flops(self._config, n_prompt) for one in (DENSE, counted))
        revived = habits.revived(steps) * (dense - pruned)
        decoding = replace(counted, stages=counted.decode) if isinstance(counted.decode, tuple) else counted
        prefill = counted.planned(self._config, n_prompt)
        drops = [layer for layer, rule in setting.stages if isinstance(rule, Drop)]
        gone = sum(prefill[layer] - prefill[layer + 1] for layer in drops)  # in all layers
        in_play = np.minimum(decoding.planned(self._config, n_prompt), n_prompt - gone) + (steps + 1) / 2
        step = costs.step + habits.overhead + costs.key * self._keys(in_play)
        return costs.start + costs.operation * (pruned + revived) + steps * step

    def _lengths(self) -> list[int]:
        """Prompt lengths, rising by an eighth of an octave, up to the model's context."""
        exponents = np.arange(int(PER_OCTAVE * np.log2(self._config.context)) + 1) / PER_OCTAVE
        return sorted({*np.rint(2.0**exponents).astype(int).tolist(), self._config.context})

    def _keys(self, in_play: np.ndarray) -> float:
        """Keys that one query reads of those in play (layers,): in a layer with a window, at most as many."""
        windows = [window or np.inf for window in self._config.windows]
        return float(np.minimum(in_play, windows).sum())

    # ---- measuring -------------------------------------------------------------------------------

    def _known(self, setting: Pruning, progress: bool) -> tuple[Costs, Habits]:
        """From memory, from the cache's file, or measured and written there."""
        name = setting.to_json()
        if self._profile is None or name not in self._profile.habits:
            file = ProfileFile(self._model.checkpoint, self._model.core, processor())
            with file.locked():
                profile = file.read()
                if profile is None or name not in profile.habits:
                    runs = HABIT_RUNS + (COST_RUNS if profile is None else 0)
                    with bar(runs, TITLE, "run", progress, leave=False) as line:
                        profile = profile or self._measured(line)
                        profile.habits[name] = self._habits(setting, profile, line)
                    file.write(profile)
            self._profile = profile
        return self._profile.costs, self._profile.habits[name]

    def _measured(self, line: Any) -> Profile:
        texts = []
        for seed in range(TEXTS):
            texts.append(self._text(seed))
            line.update()
        longest = min(LONGEST, self._config.context - STEPS)
        ids = (texts[0] * LONGEST)[:longest]
        prefills: dict[float, list[float]] = defaultdict(list)  # seconds by operations
        steps: dict[float, list[float]] = defaultdict(list)  # and by keys
        for _ in range(ROUNDS):
            for share in SHARES:
                n = max(1, longest // share)
                session = Session(self._model, DENSE)
                prefills[DENSE.flops(self._config, n)].append(_seconds(session, ids[:n]))
                keys = self._keys(np.full(self._config.n_layers, n + (STEPS + 1) / 2))
                steps[keys] += [_seconds(session, [token], generated=True) for token in ids[:STEPS]]
                line.update()
        return Profile(Costs.fitted(_medians(prefills), _medians(steps)), texts)

    def _text(self, seed: int) -> list[int]:
        """Text that the model writes after an end token, at temperature 1."""
        session, sampler = Session(self._model, DENSE), _core.Sampler(1.0, 1.0, 0, seed)
        text = [min(self._model.eos_token_ids, default=0)]
        while len(text) < min(TEXT, self._config.context // (2 * TEXTS)):
            text.append(int(sampler.sample(session.forward(text[-1:], progress=False))))
        return text

    def _habits(self, setting: Pruning, profile: Profile, line: Any) -> Habits:
        """The means of answers to the profile's texts, each with another one at the end.

        The overhead is measured after a dense prefill, with nothing to revive, in turn with dense steps.
        """
        texts = profile.texts
        prompts = [[*chain(*texts[k:], *texts[:k])] for k in range(len(texts))]
        n = len(prompts[0])
        dense, bare = (Session(self._model, one) for one in (DENSE, replace(setting, min_tokens=n + 1)))
        for session in (dense, bare):
            session.forward(prompts[0], progress=False)
        n_steps = min(HABIT_STEPS, self._config.context - n)
        more = []
        for token in prompts[0][:n_steps]:
            taken, bare_taken = (_seconds(one, [token], generated=True) for one in (dense, bare))
            read, bare_read = (self._keys(one.last_pass[:, 0]) for one in (dense, bare))
            more.append(bare_taken - taken + profile.costs.key * (read - bare_read))
        line.update()

        masses = [layer for layer, rule in setting.stages if isinstance(rule, Mass)]
        revivals, kept = [], []
        for prompt in prompts:
            session = Session(self._model, setting)
            logits = session.forward(prompt, progress=False)
            kept.append(session.last_pass[[layer + 1 for layer in masses], 0] / n)
            computed = [session.computed]
            for _ in range(n_steps):
                logits = session.forward([int(logits.argmax())], generated=True, progress=False)
                computed.append(session.computed)
            dropped = 1 - computed[0]
            shares = [(one - computed[0]) / dropped if dropped else 0.0 for one in computed[1:]]
            revivals.append(fitted_revival(shares))
            line.update()
        return Habits(fmean(revivals), max(0.0, median(more)), tuple(np.mean(kept, axis=0).tolist()))


def _with_keeps(stages: Stages, kept: Sequence[float]) -> Stages:
    """The stages with `kept`, in turn, in place of their Mass rules."""
    made, keep, found = [], 1.0, iter(kept)
    for layer, rule in stages:
        most = largest_keep(rule)
        keep = min(keep, next(found, most) if isinstance(rule, Mass) else most)
        made.append((layer, keep))
    return tuple(made)


def _seconds(session: Session, ids: list[int], generated: bool = False) -> float:
    begun = perf_counter()
    session.forward(ids, generated=generated, progress=False)
    return perf_counter() - begun


def _medians(seconds: Mapping[float, Sequence[float]]) -> list[Point]:
    return [(size, median(taken)) for size, taken in seconds.items()]
