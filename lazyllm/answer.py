"""Answer: one answer under way, token by token; it can be interrupted and continued."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from copy import copy
from functools import partial
from secrets import randbits
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lazyllm import _core
from lazyllm.checkpoints.tokenizer import TextStream
from lazyllm.generation import FinishReason, Generation, Pass, Request, Trace, table_of
from lazyllm.prompt import READ, EncodedPrompt
from lazyllm.pruning import DENSE
from lazyllm.sampling import log_softmax
from lazyllm.support.checked import SEED_LIMIT

if TYPE_CHECKING:
    from lazyllm.session import Session


class Drawn(NamedTuple):
    """A new token, with `computed` and `reached_top` of the session and the seconds since the answer began."""

    token: int
    computed: float
    reached_top: float
    seconds: float
    logprobs: dict[int, float]


class Answer:
    """One answer under way in a session. The session may refer to it; it does not refer to the session.

    `_prompt_ids` are the ids that the model reads, from position `_begins` on; empty before the prompt's pass.
    """

    def __init__(self, session: Session, encoded: EncodedPrompt, request: Request) -> None:
        self._model, self._pruning, self._core = session.llm, session.pruning, session.core
        self._encoded, self._request = encoded, request
        self._prompt_ids: list[int] = []
        self._begins = 0
        self._seconds = encoded.compress_seconds  # spent on the answer before the current call
        self._passes: list[Pass] = []
        self._drawn: list[Drawn] = []
        self._ends = self._model.eos_token_ids | frozenset(request.stop_token_ids)
        seed = request.sampling.seed
        self._seed_with(randbits(63) if seed is None else seed)
        self._read_anew()

    def _seed_with(self, seed: int) -> None:
        sampling, self._seed = self._request.sampling, seed
        self._sampler = _core.Sampler(sampling.temperature, sampling.top_p, sampling.top_k, seed)

    def prefill(self, session: Session) -> None:
        """Runs the prompt without drawing a token; `branch` makes answers that continue from there."""
        with session.exclusive_use():
            self._started = time.perf_counter() - self._seconds
            self._run_prompt(session, draws=False)
            self._record()
            self._seconds = time.perf_counter() - self._started

    def branch(self, fork: Session, index: int) -> Answer:
        """A copy of this answer that continues in a fork of the session and draws with seed + `index`."""
        branch = copy(self)
        branch._core, branch._passes, branch._drawn = fork.core, [*self._passes], []
        branch._seed_with((self._seed + index) % SEED_LIMIT)
        branch._read_anew()
        return branch

    def run(self, session: Session) -> Generator[str, None, Generation]:
        """Generates the tokens that are missing, yields pieces of the text and returns the Generation. The last
        new token is drawn but not run: the next call on the session runs it."""
        with session.exclusive_use():
            self._started = time.perf_counter() - self._seconds
            try:
                while not self._complete:
                    self._advance(session)
                    if piece := self._read():
                        yield piece
                session.unfinished = None
                return self._generation()
            except BaseException as error:
                self._interrupted(session, error)
                raise
            finally:
                self._seconds = time.perf_counter() - self._started
                if self._encoded.in_chat and self._n_run >= 0:
                    n_run, prompt, tools = len(self._prompt_ids), self._encoded.prompt, self._request.tools
                    session.answered(self._begins, n_run, prompt, self._text, tools)

    @property
    def _n_run(self) -> int:
        """The number of new tokens in the context; below 0 while the prompt is not in it."""
        return self._core.length - self._begins - len(self._prompt_ids) if self._prompt_ids else -1

    def _advance(self, session: Session) -> None:
        """Draws the next token. A pass that an interrupted call has completed is not repeated."""
        if self._n_run < 0:
            self._run_prompt(session)
        elif self._n_run < len(self._drawn):
            run = partial(self._run(), generated=True)
            session.run_pass(run, [self._drawn[-1].token], None, self._request.progress)
        self._take(session)

    def _run_prompt(self, session: Session, draws: bool = True) -> None:
        request, is_pending = self._request, session.core.drawn is not None
        ids = self._pruning.ids(self._model, self._encoded.ids, len(session.prompts))
        if is_pending:
            session.core.trace = request.trace
        with session.prompt(ids, request.max_new_tokens, request.progress) as begins:
            self._core, self._pruning = session.core, session.pruning
            self._prompt_ids, self._begins = ids, begins
            if is_pending:
                self._record()
            self._core.trace = request.trace
            self._n_read_before = int((self._core.kinds == READ).sum())
            n_read = self._core.length - begins
            run = self._run() if draws else self._core.forward
            session.run_pass(run, ids[n_read:], self._encoded.n_given - n_read, request.progress)

    def _run(self) -> Callable[..., Any]:
        """The pass that draws the next token, or `forward` if its logits are read or changed before the draw."""
        request = self._request
        if (request.never_first and not self._drawn) or request.logprobs or request.sampling.changes_logits:
            return self._core.forward
        return partial(self._core.advance, sampler=self._sampler)

    def _take(self, session: Session) -> None:
        """Appends the token that the last pass has drawn; draws it from the logits if the pass has not."""
        self._record()
        core, request, token = self._core, self._request, self._core.drawn
        if token is None:
            logits = core.logits
            if not self._drawn:
                logits[list(request.never_first)] = -np.inf
            token = core.drawn = self._sampler.sample(request.sampling.applied(logits, core.ids))
        seconds = time.perf_counter() - self._started
        logprobs: dict[int, float] = {}
        if request.logprobs:
            values = log_softmax(core.logits)
            best = np.argsort(-values, kind="stable")[: request.logprobs].tolist()
            logprobs = {i: float(values[i]) for i in (*best, token)}
        self._drawn.append(Drawn(token, session.computed, session.reached_top, seconds, logprobs))

    def _record(self) -> None:
        """Stores the pass that has just run, unless it has been stored."""
        if not self._passes or self._core.length != self._passes[-1].length:
            self._passes.append(Pass.last_of(self._core, len(self._passes)))

    def _interrupted(self, session: Session, error: BaseException) -> None:
        """Keeps the answer for `resume`, and attaches the part that exists to the exception."""
        if self._n_run < 0:
            return
        if self._n_run == len(self._drawn) and self._core.drawn is not None:
            self._take(session)
        self._read_anew()
        self._read()
        session.unfinished = self
        if self._drawn and not isinstance(error, GeneratorExit):
            error.generation = self._generation()  # type: ignore[attr-defined]
            error.session = session  # type: ignore[attr-defined]
            error.add_note(
                f"The answer's first {len(self._drawn)} tokens are this exception's `generation`; "
                "the `resume()` of its `session` goes on. In a notebook the exception is sys.last_value."
            )

    @property
    def _complete(self) -> bool:
        """True if the answer has its last token."""
        return len(self._drawn) == self._request.max_new_tokens or self._stopped

    @property
    def _stopped(self) -> bool:
        return self._found_stop or any(drawn.token in self._ends for drawn in self._drawn[-1:])

    def _read_anew(self) -> None:
        """Resets the text, to be read from the first token again: an interrupted call may have lost a piece."""
        tokenizer = self._model.checkpoint.tokenizer
        self._stream = TextStream(tokenizer) if tokenizer else None
        self._n_read = 0  # tokens
        self._text = self._held = ""  # `_held` may begin a stop string
        self._found_stop = False

    def _read(self) -> str:
        """The text that can be shown in addition to that of the last call; later tokens do not change it."""
        if self._stream is None:
            return ""
        n_before = len(self._text)
        for drawn in self._drawn[self._n_read :]:
            if drawn.token not in self._ends:
                self._show(self._stream.push(drawn.token))
        self._n_read = len(self._drawn)
        if self._complete and not self._found_stop:
            self._show(self._stream.finish())
            if not self._found_stop:
                self._text += self._held
        return self._text[n_before:]

    def _show(self, piece: str) -> None:
        text = self._held + piece
        n, self._found_stop = shown(text, self._request.stop)
        self._text, self._held = self._text + text[:n], text[n:]

    def _generation(self) -> Generation:
        """The answer so far, which has one token at least."""
        core, model, trace = self._core, self._model, None
        if self._request.trace:
            tokens, tokenizer = (core.ids.tolist(), core.kinds, core.depths), model.checkpoint.tokenizer
            trace = Trace([*self._passes], *tokens, model.config.n_layers, self._pruning, tokenizer)
        ended: FinishReason = "stop" if self._stopped else "length"
        return Generation(
            text=self._text,
            token_ids=[drawn.token for drawn in self._drawn],
            prompt_ids=self._prompt_ids,
            n_given=self._encoded.n_given,
            ttft=self._drawn[0].seconds,
            seconds=self._drawn[-1].seconds,
            tokenize_seconds=self._encoded.tokenize_seconds,
            policy_seconds=sum(item.policy_seconds for item in self._passes),
            computed_series=np.array([drawn.computed for drawn in self._drawn]),
            reached_top_series=np.array([drawn.reached_top for drawn in self._drawn]),
            passes=table_of(self._passes),
            recorded=trace,
            pruning=self._pruning,
            finish_reason=ended if self._complete else "interrupted",
            speedup=self._speedup(),
            unpruned=self._unpruned(),
            seed=self._seed if self._request.sampling.temperature else None,
            logprobs=[drawn.logprobs for drawn in self._drawn] if self._request.logprobs else None,
        )

    def _speedup(self) -> float | None:
        """Counted work, dense over pruned. Tokens read ahead count as if the prompt's pass had computed them."""
        n_given = len(self._encoded.ids)
        n_context, n_new = self._begins + n_given, n_given + (self._n_read_before if self._begins else 0)
        prefill = next(item for item in self._passes if item.length == self._begins + len(self._prompt_ids))
        if len(self._prompt_ids) == n_given and not prefill.dropped:
            return 1.0
        counts = prefill.counts.copy()
        counts[:, 1] = np.minimum(counts[:, 0], counts[:, 1] + self._n_read_before)
        config = self._model.config
        pruned = self._pruning.prefill_flops(config, n_new, counts)
        dense = DENSE.pass_flops(config, np.tile([n_context, n_new, 0], (config.n_layers, 1)))
        return None if pruned is None else dense / pruned

    def _unpruned(self) -> str:
        shortened = len(self._prompt_ids) < self._encoded.n_given
        if self._pruning == DENSE or shortened or any(item.dropped for item in self._passes):
            return ""
        return self._pruning.why_unpruned(self._core.n_prompt, self._core.length)


def shown(text: str, stops: Iterable[str]) -> tuple[int, bool]:
    """How many characters of an unfinished text may be shown, and True if a stop string follows them. An end
    that may be the beginning of a stop string is held back: with the stop "END", "the EN" gives 4."""
    found = [text.find(stop) for stop in stops if stop in text]
    if found:
        return min(found), True
    held = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return len(text) - max(held, default=0), False
