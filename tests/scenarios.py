"""Typical work with a model, for the tests of memory: each piece of work gives the same whenever it is repeated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import lazyllm
from lazyllm.generation import Request

TEXT = "The harbour master wrote down every ship that came in that year, its cargo and the name of its captain. "


class Own(lazyllm.Policy):
    layers = 2

    def observe(self, view: Any) -> Any:
        return view.attention(2).mean(axis=(0, 1))

    def score(self, view: Any) -> Any:
        view.protected, view.queries(), view.values(), view.hidden(), view.observed
        return view.attention().mean(axis=(0, 1)) + 0 * view.keys().sum() if view.is_prompt else view.positions[::2]


class Failing(Own):
    def score(self, view: Any) -> Any:
        raise LookupError("enough")


class Stop(Exception):
    pass


class Scenarios:
    """A model with a chat template, and what is done with it. `first` and `second` are layers for stages."""

    def __init__(self, path: Path, folder: Path, first: int, second: int) -> None:
        self.path, self.folder, self.first = path, folder, first
        self.llm = lazyllm.load(path, threads=2)
        self.ids = np.random.default_rng(0).integers(0, self.llm.config.vocab, 256).tolist()
        self.stages = lazyllm.Pruning({first: 0.6, second: 0.3}, decode={second: 0.5})
        scoring = lazyllm.Scoring.recommended()
        self.recommended = lazyllm.Pruning({first: 0.5, second: 0.2}, scoring=scoring, sink=4)
        self.own = Own({first: 0.5, second: 0.2})

    def all(self) -> dict[str, Callable[[], Any]]:
        """By name: what returns the same every time."""
        names = [name for kind in reversed(type(self).__mro__) for name in vars(kind)]
        return {name: getattr(self, name) for name in names if not name.startswith("_") and name != "all"}

    def dense(self) -> Any:
        return self.llm.session().forward(self.ids)

    def pruned(self) -> Any:
        session = self.llm.session(self.stages)
        return [session.forward(self.ids), session.forward([5], generated=True), session.depths, session.kinds]

    def generated(self) -> Any:
        sampling = lazyllm.SamplingParams(1.0, seed=3)
        return self.llm.generate(TEXT * 2, self.recommended, max_new_tokens=8, sampling=sampling).token_ids

    def traced(self) -> Any:
        answer = self.llm.generate(self.ids, self.stages, max_new_tokens=3, trace=True)
        answer.trace.heatmap()._repr_html_()
        return [answer.token_ids, [stage.scores for stage in answer.trace.stages]]

    def batch(self) -> Any:
        answers = self.llm.generate(["One, two,", "Red, green,"], max_new_tokens=3, progress=False)
        return [answer.text for answer in answers]

    def conversation(self) -> Any:
        session = self.llm.session(self.stages)
        asked = ("What does a harbour master do?", "And at night?")
        return [session.ask(text, chat=True, max_new_tokens=6).text for text in asked]

    def left(self) -> Any:
        stream = self.llm.stream(TEXT, self.stages, max_new_tokens=20)
        return [next(stream), next(stream)]

    def stopped(self) -> Any:
        """A pass that its watch stops, and an answer that an exception interrupts and `resume` ends."""
        session = self.llm.session(self.stages)

        def stop(layers_done: int, n_layers: int) -> None:
            raise Stop

        try:
            session.core.forward(self.ids, watch=stop)
        except Stop:
            stream = session.answer(self.ids[:60], Request(4, progress=False))
        try:
            next(stream)
            stream._pieces.throw(Stop)
        except Stop as error:
            text = error.generation.text  # type: ignore[attr-defined]
        return [text, session.resume().token_ids]

    def forked(self) -> Any:
        session = self.llm.session(self.stages)
        session.forward(self.ids[:100])
        fork = session.fork()
        found = [fork.forward(self.ids[100:140]), session.forward(self.ids[200:220])]
        fork.truncate(110)
        return [*found, fork.forward(self.ids[:9])]

    def restored(self) -> Any:
        """A second session, made from the parts of the first one's state."""
        session = self.llm.session(self.stages)
        session.ask(self.ids[:120], max_new_tokens=3)
        core, copy = session.core, self.llm.core.session(self.stages.core())
        copy.set_tokens(core.ids, core.kinds, core.depths, core.gone)
        for layer in range(self.llm.config.n_layers):
            for part in ("keys", "values", "aux"):
                if core.state_length(part, layer):
                    copy.set_state(part, layer, core.state(part, layer))
        return copy.forward(self.ids[:5])

    def failed(self) -> Any:
        """Calls that are refused, before a pass and within it."""
        session = self.llm.session(Failing({self.first: 0.5}))
        core, stages = self.llm.core, self.stages.core()
        for call in (
            lambda: self.llm.generate([10**6]),
            lambda: self.llm.session({99: 0.5}),
            lambda: core.session({**stages, "protect": [(1,)]}),
            lambda: core.session({**stages, "decode": [(1, 2.0)]}),
            lambda: core.session(stages).set_state("keys", 0, b"four"),
            lambda: lazyllm.load(self.folder),
            lambda: self.llm.restore(Path(__file__)),
            lambda: session.forward(self.ids),
        ):
            try:
                call()
            except (ValueError, TypeError, OSError, LookupError):
                continue
            raise AssertionError("not refused")
        return session.length

    def by_policy(self) -> Any:
        return self.llm.session(self.own).forward(self.ids)

    def prefixed(self) -> Any:
        """Documents of which each begins like the one before; no room for all of them."""
        cache = lazyllm.PrefixCache(max_bytes=64 << 20)
        document = self.ids * 2
        prompts = [document[:450] + [7] * 30, document[:500] + [8] * 30, [9] * 480]
        answers = self.llm.generate(prompts, self.stages, max_new_tokens=2, prefix=cache, progress=False)
        return [answer.token_ids for answer in answers]

    def read(self) -> Any:
        session = self.llm.session(self.stages)
        session.read(self.ids)
        return [session.fork().forward(self.ids[i : i + 20]) for i in (0, 50)]
