"""Session: one growing context of one model; models and settings themselves never change."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import numpy as np

from lazyllm import _core
from lazyllm.generation import FinishReason, Generation, Request, Stream
from lazyllm.machine.memory import check_memory
from lazyllm.method import Method
from lazyllm.model import Model
from lazyllm.prompt import Conversation, EncodedPrompt, Prompt, PromptIds, checked_ids, is_messages
from lazyllm.sampling import SamplingParams
from lazyllm.stop_finder import StopFinder
from lazyllm.support.progress import prefill_watch
from lazyllm.trace import Recorder

T = TypeVar("T")
MIN_SPARE = 64  # tokens reserved ahead; a context longer than this doubles its buffers instead


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of `work()`, and the seconds that it took."""
    begun = time.perf_counter()
    return work(), time.perf_counter() - begun


class Session:
    """A context that grows by `forward` and `ask`; made by `LLM.session`. It serves one thread at a time.

    A pass that was interrupted (Ctrl-C) or failed leaves the session unusable and the model as it was.
    """

    def __init__(self, model: Model, method: Method) -> None:
        method.check(model.config)
        if told := method.mismatch(model.checkpoint):
            warnings.warn(told, stacklevel=3)
        self.llm = model
        self.pruning = method
        self.core = model.core.session(method.core())
        self._room = 0  # capacity of the buffers, in tokens
        self._n_prompts = 0
        self._n_given = 0  # prompt tokens, including those that the method removed
        self._token_ids: list[int] = []
        self._pending: list[int] = []  # the token generated last, which the model has not run yet
        self._conversation = Conversation(model)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Session of {self.llm.config.name or 'a model'}: {self.length} tokens, {self.pruning}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session cannot be copied or pickled; open another one with llm.session()")

    # ---- state -----------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens run through the model."""
        return int(self.core.length)

    @property
    def depths(self) -> np.ndarray:
        """Layers that hold K,V of each token (of tokens that are gone: that computed it)."""
        return np.array(self.core.depths)

    @property
    def kinds(self) -> np.ndarray:
        """0 for prompt tokens, 1 for generated ones."""
        return np.array(self.core.kinds)

    @property
    def computed(self) -> float:
        """Share of (prompt token, layer) pairs computed so far."""
        return float(self.core.computed) * self._share_run()

    @property
    def reached_top(self) -> float:
        """Share of prompt tokens computed in the last layer so far."""
        return float(self.core.reached_top) * self._share_run()

    def _share_run(self) -> float:
        """Prompt tokens run through the model, as a share of those given."""
        return int(self.core.n_prompt) / self._n_given if self._n_given else 1.0

    @property
    def last_pass(self) -> np.ndarray:
        """The counts of the last pass (layers, 3): tokens in play, computed, revived."""
        return np.array(self.core.last_pass)

    @property
    def last_policy_seconds(self) -> float:
        """The time that the last pass spent in a `Policy`."""
        return float(self.core.policy_seconds)

    # ---- growing the context ---------------------------------------------------------------------

    def forward(self, ids: PromptIds, generated: bool = False, progress: bool = True) -> np.ndarray:
        """Runs new tokens of a prompt or (generated=True) an answer: the last one's logits (vocab,)."""
        new = checked_ids(ids, self.llm.config.vocab)
        n_given = len(new)
        with self._exclusive_use():
            if not generated:
                self._refuse_ids()
                new = self.pruning.ids(self.llm, new, self._n_prompts)
            self._reserve(len(new), spare=max(MIN_SPARE, self.length))
            self._run_pending()
            if not generated:
                self._begin_prompt(n_given, len(new))
            with prefill_watch(len(new), self.llm.config.n_layers, progress) as watch:
                logits = self.core.forward(new, generated=generated, watch=watch)
            self._token_ids += new
        return np.asarray(logits)

    def surprisal(self, ids: PromptIds, progress: bool = True) -> np.ndarray:
        """Runs new prompt tokens; returns -ln p (n,) of each given all before it.

        The first token of a context has NaN. Only for sessions without pruning.
        """
        new = checked_ids(ids, self.llm.config.vocab)
        if self.pruning.compresses or self.pruning.kept(len(new)) < len(new):
            raise ValueError(f"surprisal needs a session without pruning, not one with {self.pruning}")
        with self._exclusive_use():
            self._reserve(len(new), spare=max(MIN_SPARE, self.length))
            self._run_pending()
            self._begin_prompt(len(new), len(new))
            with prefill_watch(len(new), self.llm.config.n_layers, progress) as watch:
                surprisal = self.core.surprisal(new, watch=watch)
            self._token_ids += new
        return np.asarray(surprisal)

    def ask(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        stop: str | Iterable[str] = (),
        chat: bool = False,
        trace: bool = False,
        progress: bool = True,
    ) -> Generation:
        """Answers a prompt that continues the context or (chat=True) the chat; options as in `generate`."""
        request = Request.checked(max_new_tokens, sampling, stop, trace, progress)
        return self.answer(prompt, request, chat).finished()

    def answer(self, prompt: Prompt, request: Request, chat: bool = False) -> Stream:
        """Encodes a prompt; iterating over the stream runs it and generates the answer."""
        return Stream(self._answer(prompt, self._encoded(prompt, chat), request, chat))

    def check_prompt(self, prompt: Prompt, request: Request, chat: bool = False) -> None:
        """Raises the error that `answer` would raise for this prompt, without running the model.

        The length is not checked where the method compresses the text.
        """
        ids = self._tokenized(prompt, chat)
        if not self.pruning.compresses:
            self.pruning.check_length(self.llm.config, len(ids))
            self._check_room(self.pruning.kept(len(ids)), request.max_new_tokens)

    # ---- encoding --------------------------------------------------------------------------------

    def _tokenized(self, prompt: Prompt, chat: bool) -> list[int]:
        if not (isinstance(prompt, str) or is_messages(prompt)):
            self._refuse_ids()
        ended_by = next((token for token in self._pending if token in self.llm.eos_token_ids), None)
        return self._conversation.encode(prompt, chat, self.length == 0, ended_by)

    def _encoded(self, prompt: Prompt, chat: bool) -> EncodedPrompt:
        ids, tokenize_seconds = timed(lambda: self._tokenized(prompt, chat))
        if not self.pruning.compresses:
            return EncodedPrompt(ids, len(ids), tokenize_seconds)
        short, compress_seconds = timed(lambda: self._compressed(prompt))
        short_ids, tokenize_seconds = timed(lambda: self._tokenized(short, chat))
        return EncodedPrompt(short_ids, len(ids), tokenize_seconds, compress_seconds)

    def _compressed(self, prompt: Any) -> Prompt:
        """The method's shorter form of a text, or of the users' messages in a chat."""
        if isinstance(prompt, str):
            return self.pruning.compress(self.llm, prompt)
        return [
            {**one, "content": self.pruning.compress(self.llm, one["content"])}
            if one["role"] == "user"
            else one
            for one in prompt
        ]

    def _refuse_ids(self) -> None:
        if self.pruning.compresses:
            raise TypeError(
                f"{type(self.pruning).__name__} needs a prompt of text or messages, not of token ids"
            )

    # ---- answering -------------------------------------------------------------------------------

    def _answer(
        self, prompt: Prompt, encoded: EncodedPrompt, request: Request, chat: bool
    ) -> Generator[str, None, Generation]:
        """Runs the prompt, yields pieces of the answer's text and returns the Generation.

        The last new id is not run through the model: the next call on this session runs it first.
        """
        with self._exclusive_use():
            started = time.perf_counter() - encoded.compress_seconds
            prompt_ids = self.pruning.ids(self.llm, encoded.ids, self._n_prompts)
            self._reserve(len(prompt_ids), request.max_new_tokens, spare=self.length)
            sampling = request.sampling
            sampler = _core.Sampler(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
            tokenizer, finder = self.llm.tokenizer_if_any, StopFinder(request.stop)
            stream = tokenizer.stream() if tokenizer else None
            recorder = Recorder(self.core, request.trace)
            eos = self.llm.eos_token_ids
            token_ids: list[int] = []
            pieces: list[str] = []
            computed: list[float] = []
            reached_top: list[float] = []
            ttft = seconds = 0.0
            finish_reason: FinishReason = "length"

            while len(token_ids) < request.max_new_tokens:
                if token_ids:
                    token = self._step(sampler, recorder)
                else:
                    token = self._prefill(prompt_ids, encoded.n_given, sampler, recorder, request)
                seconds = time.perf_counter() - started
                ttft = ttft or seconds
                token_ids.append(token)
                computed.append(self.computed)
                reached_top.append(self.reached_top)
                if token in eos or token in request.stop_ids:
                    finish_reason = "stop"
                    break
                if stream and (piece := finder.push(stream.push(token))):
                    pieces.append(piece)
                    yield piece
                if finder.stopped:
                    break
            if stream and (piece := finder.push(stream.finish()) + finder.finish()):
                pieces.append(piece)
                yield piece
            text = "".join(pieces)
            if chat:
                self._conversation.answered(prompt, text)
            return Generation(
                text=text,
                token_ids=token_ids,
                prompt_ids=prompt_ids,
                n_given=encoded.n_given,
                ttft=ttft,
                seconds=seconds,
                tokenize_seconds=encoded.tokenize_seconds,
                policy_seconds=recorder.policy_seconds,
                computed_series=np.array(computed),
                reached_top_series=np.array(reached_top),
                passes=recorder.counts(),
                recorded=recorder.trace(self._token_ids, self.llm.config.n_layers, self.pruning, tokenizer),
                pruning=self.pruning,
                finish_reason="stop" if finder.stopped else finish_reason,
            )

    @contextmanager
    def _exclusive_use(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this session is in use: another thread, a progress callback or a stream is running it; "
                "open one session for each"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _check_room(self, n_given: int, n_new: int) -> int:
        """The length with `n_given` and `n_new` more tokens; ValueError if it exceeds the model's context."""
        length = self.length + len(self._pending)
        total, config = length + n_given + n_new, self.llm.config
        if total > config.context:
            raise ValueError(
                f"{length} tokens in the session, {n_given} given and {n_new} to be generated make {total}; "
                f"the model's context is {config.context}"
            )
        return total

    def _reserve(self, n_given: int, n_new: int = 0, spare: int = 0) -> None:
        """Reserves buffers; ValueError beyond the model's context, MemoryError beyond the free memory."""
        if self.length != len(self._token_ids):
            raise RuntimeError("an earlier pass of this session did not finish; open a new session")
        total = self._check_room(n_given, n_new)
        if total > self._room:
            room = min(self.llm.config.context, total + spare)
            if self.llm.device == "cpu":  # Linux overcommits; other devices refuse by themselves
                check_memory(self.core.bytes_for(room), room)
            self.core.reserve(room)
            self._room = room

    def _begin_prompt(self, n_given: int, n_new: int) -> None:
        """Counts a prompt and marks its gaps; called when nothing but the pass itself can fail."""
        gaps = self.pruning.gaps(n_new, self._n_prompts)
        self._n_prompts += 1
        self._n_given += n_given
        if gaps.size:
            self.core.leave_out(self.length + gaps)

    def _prefill(
        self, ids: list[int], n_given: int, sampler: _core.Sampler, recorder: Recorder, request: Request
    ) -> int:
        """Runs a prompt and draws the first id of its answer."""
        with prefill_watch(len(ids), self.llm.config.n_layers, request.progress) as watch:
            self._run_pending(recorder)
            self._begin_prompt(n_given, len(ids))
            if request.never_first:
                logits = self.core.forward(ids, watch=watch)
                logits[list(request.never_first)] = -np.inf
                token = int(sampler.sample(logits))
            else:
                token = int(self.core.advance(ids, sampler, watch=watch))
        recorder.passed(generated=False)
        self._token_ids += ids
        self._pending = [token]
        return token

    def _step(self, sampler: _core.Sampler, recorder: Recorder) -> int:
        """Runs the id generated last and draws the next one."""
        new, self._pending = self._pending, []  # cleared first: an interrupted pass must not run it twice
        token = int(self.core.advance(new, sampler, generated=True))
        recorder.passed(generated=True)
        self._token_ids += new
        self._pending = [token]
        return token

    def _run_pending(self, recorder: Recorder | None = None) -> None:
        if not self._pending:
            return
        new, self._pending = self._pending, []
        self.core.forward(new, generated=True)
        if recorder:
            recorder.passed(generated=True)
        self._token_ids += new
