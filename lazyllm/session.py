"""Session: one growing context of one model; models and settings themselves never change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack
from uuid import uuid4

import numpy as np

from lazyllm import _core
from lazyllm.answer import Answer
from lazyllm.generation import Generation, Options, Request, Stream
from lazyllm.machine.memory import check_memory, reserve
from lazyllm.method import Method
from lazyllm.prompt import READ, EncodedPrompt, Ids, Place, Prompt, Tools, as_messages, checked_ids, is_messages
from lazyllm.pruning import DENSE
from lazyllm.session_file import write
from lazyllm.support.files import user_path
from lazyllm.support.progress import prefill_watch
from lazyllm.support.signatures import takes

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.prefix_cache import PrefixCache

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Session:
    """A context that grows by `forward` and `ask`; made by `LLM.session`. It serves one thread at a time.

    A pass that is interrupted (Ctrl-C) or fails leaves the session as it was. An answer is many passes: the
    exception that interrupts one has its part so far as `generation`, and `resume` continues it.
    """

    llm: LLM
    setting: Method
    pruning: Method  # the setting for the length of the first prompt, once that has begun
    core: _core.Session
    prefixes: PrefixCache | None
    room: int = 0  # capacity of the buffers, in tokens
    places: tuple[Place, ...] = ()  # of prompts, also of those whose pass failed
    document: Mapping[str, Any] | None = None
    """The text and options of the `Document` whose session this is, to make it again."""
    unfinished: Answer | None = field(default=None, init=False)
    """The interrupted answer that `resume` continues; None once anything else has changed the context."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session cannot be copied or pickled; use fork() or llm.session()")

    def __repr__(self) -> str:
        return f"<Session of {self.llm.config.name or 'a model'}: {self.length} tokens, {self.setting.label}>"

    @property
    def length(self) -> int:
        """Tokens run through the model."""
        return self.core.length

    @property
    def depths(self) -> np.ndarray:
        """The number of layers that hold K,V of each token; of a token that is gone, those that computed it."""
        return self.core.depths

    @property
    def kinds(self) -> np.ndarray:
        """0 for prompt tokens, 1 for generated ones, 2 for prompt tokens read, until the next pass."""
        return self.core.kinds

    @property
    def computed(self) -> float:
        """Share of (prompt token, layer) pairs computed so far."""
        return self._share_of_prompts(self.depths.astype(np.int64)) / self.llm.config.n_layers

    @property
    def reached_top(self) -> float:
        """Share of prompt tokens computed in the last layer so far."""
        return self._share_of_prompts(self.depths == self.llm.config.n_layers)

    @property
    def prompts(self) -> tuple[Place, ...]:
        """The places of the context's prompts, or of what truncation has left of them."""
        return tuple(place.until(self.length) for place in self.places if place.begins < self.length)

    def _share_of_prompts(self, of_tokens: np.ndarray) -> float:
        """The mean over the prompt tokens given; those that never ran through the model count as 0."""
        n_given = sum(place.n_given for place in self.prompts)
        return float(of_tokens[self.kinds != 1].sum()) / n_given if n_given else 0.0

    @property
    def last_pass(self) -> np.ndarray:
        """The counts of the last pass (layers, 3): tokens in play, computed, revived."""
        return self.core.last_pass

    def fork(self) -> Session:
        """A second session in the same state. Later calls on one of them do not change the other."""
        with self.exclusive_use():
            return replace(self, core=self.forked_core(), document=None)

    def truncate(self, n: int) -> None:
        """Shortens the context to its first `n` tokens; what has been computed of them stays. A token that was
        drawn but not run is dropped, even if `n` is the length."""
        with self.exclusive_use():
            self.core.truncate(n)
            self.unfinished = None

    def save(self, file: str | Path, progress: bool = True) -> None:
        """Writes the session to a file, whole or not at all; `LLM.restore` opens it."""
        with self.exclusive_use():
            if not self.length:
                raise ValueError("the session is empty; there is nothing to save")
            write(self, user_path(file), progress)

    def forward(self, ids: Ids, generated: bool = False, progress: bool = True) -> np.ndarray:
        """Runs new tokens of a prompt or (generated=True) an answer, and returns the logits (vocab,) of the last."""
        tokens = checked_ids(ids, self.llm.config.vocab)
        if generated:
            return self._run_alone(partial(self.core.forward, generated=True), tokens, None, progress)
        self.check_ids_allowed()
        with self.exclusive_use():
            new = self.setting.ids(self.llm, tokens, len(self.prompts))
            with self.prompt(new, 0, progress) as begins:
                n_read = self.length - begins
                return self.run_pass(self.core.forward, new[n_read:], len(tokens) - n_read, progress)

    def read(self, prompt: str | Ids, progress: bool = True) -> None:
        """Reads the beginning of a prompt, up to the layer of the first stage. The next `ask` or `forward`
        decides by its own tokens which of those read are computed further, as if all were one prompt."""
        if not self.setting.reads_in_parts:
            raise ValueError(f"prompts cannot be read in parts with {self.setting}")
        new = self.encode(prompt).ids
        self._run_alone(self.core.read, new, len(new), progress)

    def surprisal(self, ids: Ids, progress: bool = True) -> np.ndarray:
        """-ln p (n,) of each of these new prompt tokens given all before it, NaN for the first of a context;
        only for sessions without pruning."""
        new = checked_ids(ids, self.llm.config.vocab)
        if self.setting != DENSE:
            raise ValueError(f"surprisal needs a session without pruning, not one with {self.setting}")
        return self._run_alone(self.core.surprisal, new, len(new), progress)

    def _run_alone(self, run: Callable[..., T], ids: list[int], n_given: int | None, progress: bool) -> T:
        with self.exclusive_use():
            self.reserve(len(ids))
            return self.run_pass(run, ids, n_given, progress)

    @takes(Request, "never_first")
    def ask(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Answers a prompt that continues the context or (chat=True) the chat; options as in `generate`."""
        return self.answer(prompt, Request(**options)).finished()

    def answer(self, prompt: Prompt | EncodedPrompt, request: Request) -> Stream:
        """Encodes a prompt; iterating over the stream runs it and generates the answer."""
        if not isinstance(prompt, EncodedPrompt):
            prompt = self.encode(prompt, request)
        return Stream(Answer(self, prompt, request).run(self))

    def answers(self, prompt: EncodedPrompt, request: Request, n: int) -> Generation | list[Generation]:
        """The answer, or with `n` above 1 a list of `n` answers: the prompt runs once, and each answer continues in
        a fork, with a seed of its own."""
        answers = [stream.finished() for stream in self.streams(prompt, request, n)]
        return answers if n > 1 else answers[0]

    def streams(self, prompt: EncodedPrompt, request: Request, n: int) -> Iterator[Stream]:
        """The streams of `answers`, each to be read before the next."""
        if n == 1:
            yield self.answer(prompt, request)
            return
        answer = Answer(self, prompt, request)
        answer.prefill(self)
        for i, fork in enumerate(self.fork() for _ in range(n)):
            yield Stream(answer.branch(fork, i).run(fork))

    def resume(self) -> Generation:
        """The whole of the interrupted answer, equal to one that was not interrupted. It can be continued until
        something else changes the session: another prompt, `forward` or `truncate`."""
        if self.unfinished is None:
            raise RuntimeError("no answer of this session waits to go on; ask, or generate")
        return Stream(self.unfinished.run(self)).finished()

    def checked_prompt(self, prompt: Prompt, request: Request) -> EncodedPrompt:
        """The prompt encoded for `answer`, after all checks; ValueError also for a prompt that repeats the whole
        context."""
        encoded = self.encode(prompt, request)
        if 0 < self.length <= 2 * len(encoded.ids) and (tokenizer := self.llm.checkpoint.tokenizer):
            held, asked = (tokenizer.decode(ids).strip() for ids in (self.core.ids.tolist(), encoded.ids))
            if held and asked.startswith(held):
                raise ValueError(
                    "the prompt begins with what the prefix holds, which would stand in the context twice; "
                    "give only what follows it, or whole prompts with prefix=PrefixCache()"
                )
        self.check_room(self.setting.kept(len(encoded.ids)), request.max_new_tokens)
        return encoded

    # ---- prompts and turns of a chat ---------------------------------------------------------------------

    def encode(self, prompt: Prompt, request: Request | None = None) -> EncodedPrompt:
        """A prompt encoded to be appended to the context, its text shortened if the method compresses."""
        request, started = request or Request(), time.perf_counter()
        chat = request.chat or is_messages(prompt)
        if (request.tools or request.chat_template_kwargs) and not chat:
            raise ValueError("tools and chat_template_kwargs are for a chat template: they need chat=True")
        ids = self._ids(prompt, chat, request)
        n_given, compressing = len(ids), time.perf_counter()
        if self.setting.compresses:
            messages = as_messages(prompt)
            for message in messages:
                if message["role"] == "user":
                    message["content"] = self.setting.compress(self.llm, message["content"])
            ids = self._ids(messages if chat else messages[0]["content"], chat, request)
        return EncodedPrompt(prompt, ids, n_given, chat, compressing - started, time.perf_counter() - compressing)

    def _ids(self, prompt: Prompt, chat: bool, request: Request) -> list[int]:
        ids: Any = self._rendered(as_messages(prompt), request) if chat else prompt
        if isinstance(ids, str):
            ids = self.llm.tokenizer.encode(ids, add_special=self.length == 0 and not chat)
        else:
            self.check_ids_allowed()
        return checked_ids(ids, self.llm.config.vocab)

    def check_ids_allowed(self) -> None:
        if self.setting.compresses:
            raise TypeError(f"{type(self.setting).__name__} needs text or messages, not token ids")

    def answered(self, begins: int, n_run: int, prompt: Prompt, text: str, tools: Tools) -> None:
        """Records the tokens from `begins` on as a turn of the chat; again when its answer has continued."""
        earlier = tuple(place for place in self.prompts if place.begins < begins)
        n_given = sum(place.n_given for place in self.prompts[len(earlier) :])
        messages = [*as_messages(prompt), {"role": "assistant", "content": text}]
        self.places = (*earlier, Place(begins, n_run, n_given, messages, self._tools(tools)))

    def _tools(self, new: Tools) -> Tools:
        tools = self.prompts[0].tools if self.prompts and self.prompts[0].messages else new
        if new and list(new) != list(tools):
            raise ValueError("tools are those of the whole chat: other ones than its first prompt had")
        return tools

    def _rendered(self, new: list[dict[str, Any]], request: Request) -> str:
        """The text that the template renders for new messages after the chat so far: what follows a
        mark that stands for the last answer, which is in the context already."""
        if not all(place.messages for place in self.prompts) or (self.length and not self.prompts):
            raise ValueError(
                "a chat turn cannot follow part of a turn, or text that was read or run outside the chat; "
                "truncate to where that begins, put the text in a message, or ask without chat=True"
            )
        mark, tokenizer = uuid4().hex, self.llm.tokenizer  # the mark is in no message, whatever they say
        chat = [message for turn in self.prompts for message in turn.messages]
        chat[-1:] = [{"role": "assistant", "content": mark}] if chat else []
        text = tokenizer.chat_text([*chat, *new], tools=self._tools(request.tools), **request.chat_template_kwargs)
        _, marked, tail = text.rpartition(mark)
        if not chat:
            return text
        if not marked:
            raise ValueError("the chat template leaves earlier answers out; a follow-up cannot extend it")
        last = self.core.drawn  # the answer's end token, in the context or to be run before the prompt
        if last is None and self.kinds[-1] == 1:
            last = int(self.core.ids[-1])
        if last not in self.llm.eos_token_ids:
            return tail
        return tail.removeprefix(tokenizer.decode([last], skip_special_tokens=False))

    # ---- passes, in `exclusive_use` ----------------------------------------------------------------------

    @contextmanager
    def exclusive_use(self) -> Iterator[None]:
        """Refuses a second caller, and drops the places of prompts that are not in the context any more."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this session is in use: another thread, a progress callback or a stream is running it; "
                "open one session for each"
            )
        try:
            self.places = self.prompts
            yield
        finally:
            self._lock.release()

    def check_room(self, n_given: int, n_new: int) -> int:
        """The length with `n_given` and `n_new` more tokens; ValueError if it exceeds the model's context."""
        length = self.length + (self.core.drawn is not None)
        total, config = length + n_given + n_new, self.llm.config
        if total > config.context:
            before = f"{length} in the session, " if length else ""
            raise ValueError(
                f"{before}{n_given} given and {n_new} to be generated make {total} tokens; "
                f"the model's context is {config.context}"
            )
        return total

    def reserve(self, n_given: int, n_new: int = 0) -> None:
        """Reserves buffers, then runs the token drawn last; raises an error beyond the context or free memory."""
        total = self.check_room(n_given, n_new)
        if total > self.room:
            soon = total - n_new
            self.room = reserve(self.core, total, soon, self.llm.config.context, self.llm.device == "cpu")
        self.unfinished = None
        if self.core.drawn is not None:
            self.core.forward([self.core.drawn], generated=True)

    @contextmanager
    def prompt(self, ids: list[int], n_new: int, progress: bool) -> Iterator[int]:
        """Reserves memory for a prompt, takes its beginning from `prefixes`, decides its schedule, and gives its
        first position to the block, which runs it. If the block fails, the prompt is removed."""
        self.reserve(len(ids), n_new)
        begins = self.length
        try:
            if self.prefixes is not None and not begins:
                self.prefixes.read(self, ids, n_new, progress)
            if (self.kinds == READ).all():
                self.pruning = self.setting.for_prompt(self.llm.config_for(self.setting), begins + len(ids))
                if self.pruning != self.setting:
                    self.core.reschedule(self.pruning.core())
            yield begins
        except BaseException:
            if self.length < begins + len(ids):
                self.core.truncate(begins)
            raise

    def run_pass(self, run: Callable[..., T], ids: list[int], n_given: int | None, progress: bool) -> T:
        """The result of a pass over these ids. `n_given` is that of `Place` for ids of a prompt, None for others."""
        with prefill_watch(len(ids), self.llm.config.n_layers, progress) as watch:
            if n_given is not None:  # from here on nothing but the pass itself can fail
                self.places = (*self.prompts, Place(self.length, len(ids), n_given))
            return run(ids, watch=watch)

    def forked_core(self) -> _core.Session:
        """A second core in the same state; MemoryError beyond the free memory."""
        if self.llm.device == "cpu":
            check_memory(self.core.fork_bytes, f"a fork of a session of {self.room} tokens")
        return self.core.fork()
