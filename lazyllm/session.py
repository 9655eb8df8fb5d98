"""Session: one growing context of one model; models and settings themselves never change."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from lazyllm import __version__, _core
from lazyllm.answer import READ, Answer, Drawn
from lazyllm.generation import Generation, Request, Stream
from lazyllm.machine.memory import check_memory, fits
from lazyllm.method import Method
from lazyllm.model import Model
from lazyllm.prefix_cache import LEAST_PASS, PrefixCache
from lazyllm.prompt import (
    Conversation,
    EncodedPrompt,
    Prompt,
    PromptIds,
    PromptPlace,
    Tools,
    checked_ids,
    checked_messages,
    is_messages,
)
from lazyllm.sampling import SamplingParams
from lazyllm.schedule import SHAPE_LENGTH
from lazyllm.session_file import Description, SessionFile, identity, write
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.progress import prefill_watch

T = TypeVar("T")
LEAST_SPARE = 64  # tokens reserved ahead
SPARE = 4  # and a quarter of the context on the CPU, which takes no memory for what is not used


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result of `work()`, and the seconds that it took."""
    start = time.perf_counter()
    return work(), time.perf_counter() - start


class Session:
    """A context that grows by `forward` and `ask`; made by `LLM.session`. It serves one thread at a time.

    A pass that is interrupted (Ctrl-C) or fails leaves the session as it was before it. An answer is many
    passes: the exception that interrupts one has what there is of it as `generation`, and `resume` goes on.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        core: _core.Session | None = None,
        prefixes: PrefixCache | None = None,
        progress: bool = True,
    ) -> None:
        if core is None:
            method.check(model.config)
            if message := method.mismatch(model.checkpoint, progress):
                warnings.warn(message, stacklevel=3)
            core = model.core.session(method.for_prompt(model.config, SHAPE_LENGTH).core())
        self.llm = model
        self.setting = method
        self.pruning = method
        self.core = core
        self._room = 0  # capacity of the buffers, in tokens
        self._prompts: list[PromptPlace] = []
        self._conversation = Conversation(model)
        self._unfinished: Answer | None = None
        self._prefixes = prefixes  # for the first answer
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Session of {self.llm.config.name or 'a model'}: {self.length} tokens, {self.pruning}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a session cannot be copied or pickled; use fork(), or llm.session() for an empty one"
        )

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
        """0 for prompt tokens, 1 for generated ones, 2 for prompt tokens read, with no pass since."""
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
        n_given = sum(prompt.n_given for prompt in self._prompts)
        return int(self.core.n_prompt) / n_given if n_given else 1.0

    @property
    def last_pass(self) -> np.ndarray:
        """The counts of the last pass (layers, 3): tokens in play, computed, revived."""
        return np.array(self.core.last_pass)

    @property
    def last_policy_seconds(self) -> float:
        """The time that the last pass spent in a `Policy`."""
        return float(self.core.policy_seconds)

    # ---- the timeline ----------------------------------------------------------------------------

    def fork(self) -> Session:
        """A second session in the same state. Nothing that is done to one of them shows in the other."""
        with self._exclusive_use():
            fork = Session(self.llm, self.setting, self._forked_core())
            fork.pruning = self.pruning
            fork._room = self._room
            fork._prompts = list(self._prompts)
            fork._conversation = Conversation(self.llm, self._conversation.turns)
            return fork

    def _forked_core(self) -> _core.Session:
        if self.llm.device == "cpu":
            check_memory(self.core.fork_bytes, f"a fork of a session of {self._room} tokens")
        return self.core.fork()

    def truncate(self, n: int) -> None:
        """Back to the first `n` tokens of the context; what has been computed of them stays.

        A token that was drawn and not run yet is forgotten too, if `n` is the length.
        """
        n = checked.whole(n, "n", 0)
        with self._exclusive_use():
            if n > self.length:
                raise ValueError(f"n is {n}; the session has {self.length} tokens")
            self.core.truncate(n)
            self._unfinished = None

    def save(self, file: str | Path, progress: bool = True) -> None:
        """Writes the session to a file, whole or not at all; `LLM.restore` opens it."""
        path = user_path(file)
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"file is {path}; it must be a file's path in a folder that exists")
        with self._exclusive_use():
            if not self.length:
                raise ValueError("the session is empty; there is nothing to save")
            description = Description(
                lazyllm=__version__,
                model=self.llm.config.name,
                drawn=self.core.drawn,
                prompts=[list(prompt) for prompt in self._prompts],
                turns=[asdict(turn) for turn in self._conversation.turns],
                **identity(self.llm, self.pruning, progress),
            )
            write(path, self.core, self.llm.config, description, progress)

    @classmethod
    def restored(cls, model: Model, path: Path, pruning: Method | None, progress: bool) -> Session:
        """The session of a file; ValueError for one of another model or setting, and for a damaged file."""
        file = SessionFile(path, progress)
        session = cls(model, file.method_for(model, pruning, progress), progress=progress)
        with session._exclusive_use():
            session._reserve(file.length)
            file.fill(session.core, model.config)
            session._prompts, turns = file.prompts_and_turns(session.kinds, session.pruning)
            session._conversation = Conversation(model, turns)
        return session

    # ---- growing the context ---------------------------------------------------------------------

    def forward(self, ids: PromptIds, generated: bool = False, progress: bool = True) -> np.ndarray:
        """Runs new tokens of a prompt or (generated=True) an answer: the last one's logits (vocab,)."""
        new = checked_ids(ids, self.llm.config.vocab)
        n_given = len(new)
        with self._exclusive_use():
            if not generated:
                self._refuse_ids()
                self._schedule(len(new))
                new = self.pruning.ids(self.llm, new, len(self._prompts))
            self._reserve(len(new))
            self._run_pending()
            begins, end = self.length, self.length + len(new)
            try:
                if not generated and self._prefixes is not None and not self.length:
                    self._read_shared(self._prefixes, new, progress)
                    n_given, new = n_given - self.length, new[self.length :]
                forward = partial(self.core.forward, generated=generated)
                logits = self._pass(forward, new, None if generated else n_given, progress)
            except BaseException:
                if self.length < end:
                    self.core.truncate(begins)  # what a PrefixCache had of the prompt
                raise
        return np.asarray(logits)

    def read(self, prompt: str | PromptIds, progress: bool = True) -> None:
        """Reads the beginning of a prompt, up to the layer of the first stage; nothing is dropped yet.

        The next `ask` or `forward` decides by its own tokens which of those read are computed further, as if
        all had been one prompt. So a long document is read once, and each question asked of a `fork`.
        """
        new = self._tokenized(prompt) if isinstance(prompt, str) else prompt
        new = checked_ids(new, self.llm.config.vocab)
        if not self.pruning.reads_in_parts:
            raise ValueError(f"prompts cannot be read in parts with {self.pruning}")
        with self._exclusive_use():
            self._reserve(len(new))
            self._run_pending()
            self._pass(self.core.read, new, len(new), progress)

    def surprisal(self, ids: PromptIds, progress: bool = True) -> np.ndarray:
        """Runs new prompt tokens; returns -ln p (n,) of each given all before it.

        The first token of a context has NaN. Only for sessions without pruning.
        """
        new = checked_ids(ids, self.llm.config.vocab)
        core = self.pruning.core() or {}
        prunes = core.get("stages") or not isinstance(core.get("decode", ""), str)
        if prunes or self.pruning.compresses or self.pruning.kept(len(new)) < len(new):
            raise ValueError(f"surprisal needs a session without pruning, not one with {self.pruning}")
        with self._exclusive_use():
            self._reserve(len(new))
            self._run_pending()
            return np.asarray(self._pass(self.core.surprisal, new, len(new), progress))

    def _pass(self, run: Callable[..., T], ids: list[int], n_given: int | None, progress: bool) -> T:
        """The result of a pass over these ids; of a prompt of `n_given` tokens, unless that is None."""
        with prefill_watch(len(ids), self.llm.config.n_layers, progress) as watch:
            if n_given is not None:
                self._begin_prompt(n_given, len(ids))
            return run(ids, watch=watch)

    def ask(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        stop: str | Iterable[str] = (),
        chat: bool = False,
        trace: bool = False,
        progress: bool = True,
        tools: Tools = (),
    ) -> Generation:
        """Answers a prompt that continues the context or (chat=True) the chat; options as in `generate`."""
        request = Request.checked(max_new_tokens, sampling, stop, trace, progress, tools)
        return self.answer(prompt, request, chat).finished()

    def answer(self, prompt: Prompt, request: Request, chat: bool = False) -> Stream:
        """Encodes a prompt; iterating over the stream runs it and generates the answer."""
        encoded = self._encoded(prompt, chat, request.tools)
        return Stream(self._answer(Answer(self.llm, self.pruning, prompt, encoded, request, chat)))

    def resume(self) -> Generation:
        """Goes on with the answer that was interrupted, as if it had not been; the whole of it.

        Only while nothing else has been done to the session since: no other prompt, `forward` or `truncate`.
        """
        if self._unfinished is None:
            raise RuntimeError("no answer of this session waits to go on; ask, or generate")
        return Stream(self._answer(self._unfinished)).finished()

    def check_prompt(self, prompt: Prompt, request: Request, chat: bool = False) -> None:
        """Raises the error that `answer` would raise for this prompt, without running the model; and
        ValueError for a prompt that repeats the whole context.

        The length is not checked where the method compresses the text.
        """
        ids = self._tokenized(prompt, chat, request.tools)
        if self._repeated(prompt, ids):
            raise ValueError(
                "the prompt begins with what the prefix holds, which would stand in the context twice; give "
                "only what follows it, or whole prompts with prefix=PrefixCache()"
            )
        if not self.pruning.compresses:
            self.pruning.check_length(self.llm.config, len(ids))
            self._check_room(self.pruning.kept(len(ids)), request.max_new_tokens)

    # ---- encoding --------------------------------------------------------------------------------

    def _repeated(self, prompt: Prompt, ids: list[int]) -> bool:
        """True if a prompt of these ids begins with all text or messages of the context."""
        if is_messages(prompt):
            earlier = self._conversation.messages
            return bool(earlier) and list(prompt[: len(earlier)]) == earlier
        if 2 * len(ids) < self.length:
            return False
        if isinstance(prompt, str):  # whose ids may differ where the context ends
            text = self.llm.tokenizer.decode(self.core.ids.tolist())
            return bool(text) and self.llm.tokenizer.decode(ids).startswith(text)
        return self.length > 0 and ids[: self.length] == self.core.ids.tolist()

    def _check_turn(self) -> None:
        """Refuses a chat turn behind text that belongs to no turn, which the template would not show."""
        turns = self._conversation.turns
        outside = any(
            not any(turn.begins <= place.begins < turn.answer_begins for turn in turns)
            for place in self._prompts
        )
        if outside or (self.length and not turns):
            raise ValueError(
                "a chat turn cannot follow text that was read or run outside the chat; give that text in a "
                "message of the chat's first turn (prefix=PrefixCache() reads once what several chats share) "
                "or ask without chat=True"
            )

    def _tokenized(self, prompt: Prompt, chat: bool = False, tools: Tools = ()) -> list[int]:
        if chat:
            self._check_turn()
        if not (isinstance(prompt, str) or is_messages(prompt)):
            self._refuse_ids()
        return self._conversation.encode(prompt, chat, self.length, self._ended_by(), tools)

    def _ended_by(self) -> int | None:
        """The end token of the last answer, if the context ends with it, run already or not."""
        last = self.core.drawn
        if last is None and self.length and self.core.kinds[-1] == 1:
            last = int(self.core.ids[-1])
        return last if last in self.llm.eos_token_ids else None

    def _encoded(self, prompt: Prompt, chat: bool, tools: Tools) -> EncodedPrompt:
        ids, tokenize_seconds = timed(lambda: self._tokenized(prompt, chat, tools))
        if not self.pruning.compresses:
            return EncodedPrompt(ids, len(ids), tokenize_seconds)
        short, compress_seconds = timed(lambda: self._compressed(prompt))
        short_ids, tokenize_seconds = timed(lambda: self._tokenized(short, chat, tools))
        return EncodedPrompt(short_ids, len(ids), tokenize_seconds, compress_seconds)

    def _compressed(self, prompt: Any) -> Prompt:
        """The method's shorter form of a text, or of the users' messages in a chat."""
        if isinstance(prompt, str):
            return self.pruning.compress(self.llm, prompt)
        return [
            {**message, "content": self.pruning.compress(self.llm, message["content"])}
            if message["role"] == "user"
            else message
            for message in checked_messages(prompt)
        ]

    def _refuse_ids(self) -> None:
        if self.pruning.compresses:
            raise TypeError(
                f"{type(self.pruning).__name__} needs a prompt of text or messages, not of token ids"
            )

    # ---- answering -------------------------------------------------------------------------------

    def _answer(self, answer: Answer) -> Generator[str, None, Generation]:
        """Generates what an answer lacks, yields pieces of its text and returns the Generation.

        The last new id is not run through the model: the next call on this session runs it first.
        """
        with self._exclusive_use():
            started = time.perf_counter() - answer.seconds
            try:
                if not answer.started:
                    self._start(answer)
                if not self._holds_prompt(answer):
                    n_read = 0 if answer.begins is None else self.length - answer.begins
                    n_left = len(answer.prompt_ids) - n_read
                    self._reserve(n_left, answer.request.max_new_tokens)
                while not answer.complete:
                    self._advance(answer, started)
                    if piece := answer.read():
                        yield piece
                self._unfinished = None
                return answer.generation()
            except BaseException as error:
                self._interrupted(answer, started, error)
                raise
            finally:
                answer.seconds = time.perf_counter() - started
                if answer.chat and self._holds_prompt(answer):
                    assert answer.begins is not None
                    self._conversation.answered(
                        answer.begins, answer.prompt_end, answer.prompt, answer.text, answer.request.tools
                    )

    def _start(self, answer: Answer) -> None:
        self._schedule(len(answer.encoded.ids))
        answer.pruning = self.pruning
        ids = self.pruning.ids(self.llm, answer.encoded.ids, len(self._prompts))
        if self._prefixes is None or self.length:
            answer.start(self.core, ids)
            return
        self._reserve(len(ids), answer.request.max_new_tokens)
        self._read_shared(self._prefixes, ids, answer.request.progress)
        answer.start(self.core, ids)
        answer.begins = 0

    def _schedule(self, n_new: int) -> None:
        """Takes the setting's schedule for a first prompt of `n_new` tokens behind those read."""
        if (self.core.kinds == READ).all():
            self.pruning = self.setting.for_prompt(self.llm.config, self.length + n_new)
            self._reschedule()

    def _reschedule(self) -> None:
        if self.pruning is not self.setting:
            self.core.reschedule(self.pruning.core())

    def _read_shared(self, prefixes: PrefixCache, ids: list[int], progress: bool) -> None:
        """Reads of an empty session's prompt what may be read ahead, as far as it goes from the cache; all of
        it or, on failure, nothing."""
        ahead = prefixes.readable(self.setting, ids)
        if fork := prefixes.longest(self.llm, self.setting, ahead):
            self.core, self._room = fork, 0
            self._reschedule()
            self._prompts = [PromptPlace(0, fork.length, fork.length)]
        try:
            if len(ahead) - self.length >= LEAST_PASS:
                self._reserve(len(ids) - self.length)
                self._pass(self.core.read, ahead[self.length :], len(ahead) - self.length, progress)
                self._hand_over(prefixes)
        except BaseException:
            self.core.truncate(0)
            raise

    def _hand_over(self, prefixes: PrefixCache) -> None:
        """Leaves the context to the cache and goes on in a fork of it, whose memory ends with the answer.
        Without memory for that the context is not kept."""
        if not prefixes.has_room(self.core):
            return
        try:
            fork = self._forked_core()
        except MemoryError as error:
            warnings.warn(f"the PrefixCache does not keep the beginning of a prompt: {error}", stacklevel=2)
            return
        kept, self.core = self.core, fork
        prefixes.keep(self.llm, self.setting, kept)

    def _holds_prompt(self, answer: Answer) -> bool:
        return answer.begins is not None and self.length >= answer.prompt_end

    def _advance(self, answer: Answer, started: float) -> None:
        """Draws the next token. What an interrupted call has done already is not done again."""
        if answer.begins is None:
            self._run_pending()
            answer.recorder.passed()
            answer.begins = self.length
        if self.length < self._due(answer):
            if answer.drawn:
                self.core.advance([answer.drawn[-1].token], answer.sampler, generated=True)
            else:
                self._run_prompt(answer)
        self._take(answer, started)

    def _due(self, answer: Answer) -> int:
        """The length of the context after the pass that draws the answer's next token."""
        return answer.prompt_end + len(answer.drawn)

    def _run_prompt(self, answer: Answer) -> None:
        assert answer.begins is not None
        n_read = self.length - answer.begins
        run: Callable[..., Any] = partial(self.core.advance, sampler=answer.sampler)
        if answer.request.never_first:
            run = self.core.forward
        n_given = answer.encoded.n_given - n_read
        self._pass(run, answer.prompt_ids[n_read:], n_given, answer.request.progress)

    def _take(self, answer: Answer, started: float) -> None:
        """Takes the token that the last pass has drawn; draws it from the pass's logits if it has not."""
        answer.recorder.passed()
        if self.core.drawn is None:
            logits = self.core.logits
            if not answer.drawn:
                logits[list(answer.request.never_first)] = -np.inf
            self.core.drawn = answer.sampler.sample(logits)
        assert self.core.drawn is not None
        seconds = time.perf_counter() - started
        answer.drawn.append(Drawn(self.core.drawn, self.computed, self.reached_top, seconds))

    def _interrupted(self, answer: Answer, started: float, error: BaseException) -> None:
        """Keeps an answer that can go on; the exception carries what there is of it."""
        if not self._holds_prompt(answer):
            if answer.begins is not None:
                self.core.truncate(answer.begins)  # what a PrefixCache had of the prompt
            return
        if self.length == self._due(answer) and self.core.drawn is not None:
            self._take(answer, started)
        answer.read_anew()
        answer.read()
        self._unfinished = answer
        if answer.drawn and not isinstance(error, GeneratorExit):
            error.generation = answer.generation()  # type: ignore[attr-defined]
            error.session = self  # type: ignore[attr-defined]
            error.add_note(
                f"The answer's first {len(answer.drawn)} tokens are this exception's `generation`; "
                "the `resume()` of its `session` goes on."
            )

    @contextmanager
    def _exclusive_use(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this session is in use: another thread, a progress callback or a stream is running it; "
                "open one session for each"
            )
        try:
            self._settle()
            yield
        finally:
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Brings what is known of prompts and turns in line with the context, which may have been truncated,
        or not have grown by a prompt whose pass failed."""
        self._prompts = [place.cut(self.length) for place in self._prompts if place.begins < self.length]
        self._conversation.truncate(self.length)

    def _check_room(self, n_given: int, n_new: int) -> int:
        """The length with `n_given` and `n_new` more tokens; ValueError if it exceeds the model's context."""
        length = self.length + (self.core.drawn is not None)
        total, config = length + n_given + n_new, self.llm.config
        if total > config.context:
            raise ValueError(
                f"{length} tokens in the session, {n_given} given and {n_new} to be generated make {total}; "
                f"the model's context is {config.context}"
            )
        return total

    def _reserve(self, n_given: int, n_new: int = 0) -> None:
        """Reserves buffers; ValueError beyond the model's context, MemoryError beyond the free memory."""
        total = self._check_room(n_given, n_new)
        if total > self._room:
            on_cpu = self.llm.device == "cpu"
            spare = max(LEAST_SPARE, self.length, total // SPARE if on_cpu else 0)
            room = min(self.llm.config.context, total + spare)
            if on_cpu:  # Linux overcommits; other devices refuse by themselves
                if not fits(self.core.bytes_for(room)):
                    room = total
                check_memory(self.core.bytes_for(room), f"a session of {room} tokens")
            self.core.reserve(room)
            self._room = room
        self._unfinished = None

    def _begin_prompt(self, n_given: int, n_new: int) -> None:
        """Counts a prompt and marks its gaps; called when nothing but the pass itself can fail."""
        gaps = self.pruning.gaps(n_new, len(self._prompts))
        self._prompts.append(PromptPlace(self.length, n_new, n_given))
        self.core.truncate(self.length)  # the gaps of a prompt that was interrupted before its pass
        if gaps.size:
            self.core.leave_out(self.length + gaps)

    def _run_pending(self) -> None:
        if self.core.drawn is not None:
            self.core.forward([self.core.drawn], generated=True)
