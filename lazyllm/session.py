"""Session: one growing context of one model; models and settings themselves never change."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack
from uuid import uuid4

import numpy as np

from lazyllm import _core
from lazyllm.answer import Answer
from lazyllm.generation import Generation, Options, Request, Stream, Tools
from lazyllm.machine.memory import check_memory, reserve
from lazyllm.method import Method
from lazyllm.prompt import (
    READ,
    EncodedPrompt,
    Prompt,
    PromptIds,
    PromptPlace,
    as_messages,
    check_form,
    checked_ids,
    is_messages,
)
from lazyllm.pruning import DENSE
from lazyllm.schedule import SHAPE_LENGTH
from lazyllm.session_file import write
from lazyllm.support.files import user_path
from lazyllm.support.progress import prefill_watch
from lazyllm.support.signatures import takes

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.prefix_cache import PrefixCache

T = TypeVar("T")


class Session:
    """A context that grows by `forward` and `ask`; made by `LLM.session`. It serves one thread at a time.

    A pass that is interrupted (Ctrl-C) or fails leaves the session as it was. An answer is many passes: the
    exception that interrupts one has what there is of it as `generation`, and `resume` goes on.
    """

    document: Mapping[str, Any] | None = None
    """The text and options of the `Document` whose session this is, to make it again."""
    unfinished: Answer | None = None
    """The interrupted answer that waits to go on; forgotten when anything else changes the context."""

    def __init__(
        self,
        model: LLM,
        method: Method,
        prefixes: PrefixCache | None = None,
        progress: bool = True,
        core: _core.Session | None = None,
    ) -> None:
        """`core` is a fork's, whose setting has been checked."""
        if core is None:
            method.check(model.config)
            if prefixes is not None and not method.reads_in_parts:
                raise ValueError(
                    f"prompts cannot be read in parts, as prefix={prefixes!r} asks, with {method}"
                )
            if message := method.mismatch(model.checkpoint, progress):
                warnings.warn(message, stacklevel=3)
            core = model.core.session(method.for_prompt(model.config, SHAPE_LENGTH).core())
        self.llm = model
        self.setting = method
        self.pruning = method  # what the setting is for this context's first prompt, once that has begun
        self.core = core
        self.prefixes = prefixes
        self.room = 0  # capacity of the buffers, in tokens
        self.prompts: tuple[PromptPlace, ...] = ()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Session of {self.llm.config.name or 'a model'}: {self.length} tokens, {self.setting.label}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session cannot be copied or pickled; use fork() or llm.session()")

    @property
    def length(self) -> int:
        """Tokens run through the model."""
        return self.core.length

    @property
    def depths(self) -> np.ndarray:
        """Layers that hold K,V of each token (of tokens that are gone: that computed it)."""
        return self.core.depths

    @property
    def kinds(self) -> np.ndarray:
        """0 for prompt tokens, 1 for generated ones, 2 for prompt tokens read, with no pass since."""
        return self.core.kinds

    @property
    def computed(self) -> float:
        """Share of (prompt token, layer) pairs computed so far."""
        return self.core.computed * self._share_run()

    @property
    def reached_top(self) -> float:
        """Share of prompt tokens computed in the last layer so far."""
        return self.core.reached_top * self._share_run()

    def _share_run(self) -> float:
        """Prompt tokens run through the model, as a share of those given."""
        n_given = sum(place.n_given for place in self.prompts)
        return self.core.n_prompt / n_given if n_given else 1.0

    @property
    def last_pass(self) -> np.ndarray:
        """The counts of the last pass (layers, 3): tokens in play, computed, revived."""
        return self.core.last_pass

    def fork(self) -> Session:
        """A second session in the same state. Nothing that is done to one of them shows in the other."""
        with self.exclusive_use():
            fork = Session(self.llm, self.setting, self.prefixes, core=self.forked_core())
            fork.room, fork.prompts, fork.pruning = self.room, self.prompts, self.pruning
            return fork

    def truncate(self, n: int) -> None:
        """Back to the first `n` tokens of the context; what has been computed of them stays. A token that was
        drawn and not run yet is forgotten too, if `n` is the length."""
        with self.exclusive_use():
            self.core.truncate(n)
            self.unfinished = None

    def save(self, file: str | Path, progress: bool = True) -> None:
        """Writes the session to a file, whole or not at all; `LLM.restore` opens it."""
        path = user_path(file)
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"file is {path}; it must be a file's path in a folder that exists")
        with self.exclusive_use():
            if not self.length:
                raise ValueError("the session is empty; there is nothing to save")
            write(self, path, progress)

    def forward(self, ids: PromptIds, generated: bool = False, progress: bool = True) -> np.ndarray:
        """Runs new tokens of a prompt or (generated=True) an answer: the last one's logits (vocab,)."""
        new = checked_ids(ids, self.llm.config.vocab)
        n_given = len(new)
        with self.exclusive_use():
            if generated:
                self.reserve(len(new))
                return self.run_pass(partial(self.core.forward, generated=True), new, None, progress)
            self.check_ids_allowed()
            new = self.setting.ids(self.llm, new, len(self.prompts))
            with self.prompt(new, 0, progress) as begins:
                n_read = self.length - begins
                return self.run_pass(self.core.forward, new[n_read:], n_given - n_read, progress)

    def read(self, prompt: str | PromptIds, progress: bool = True) -> None:
        """Reads the beginning of a prompt, up to the layer of the first stage. The next `ask` or `forward`
        decides by its own tokens which of those read are computed further, as if all were one prompt."""
        if not self.setting.reads_in_parts:
            raise ValueError(f"prompts cannot be read in parts with {self.setting}")
        new = self.encode(prompt).ids
        with self.exclusive_use():
            self.reserve(len(new))
            self.run_pass(self.core.read, new, len(new), progress)

    def surprisal(self, ids: PromptIds, progress: bool = True) -> np.ndarray:
        """-ln p (n,) of each of these new prompt tokens given all before it, NaN for the first of a context;
        only for sessions without pruning."""
        new = checked_ids(ids, self.llm.config.vocab)
        if self.setting != DENSE:
            raise ValueError(f"surprisal needs a session without pruning, not one with {self.setting}")
        with self.exclusive_use():
            self.reserve(len(new))
            return self.run_pass(self.core.surprisal, new, len(new), progress)

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
        """The answer; with `n` above 1 a list of as many, for which the prompt runs once: each goes on in a
        fork, with a seed of its own."""
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
        """The whole of the answer that was interrupted, as if it had not been; only while nothing else has
        been done to the session since: no other prompt, `forward` or `truncate`."""
        if self.unfinished is None:
            raise RuntimeError("no answer of this session waits to go on; ask, or generate")
        return Stream(self.unfinished.run(self)).finished()

    def checked_prompt(self, prompt: Prompt, request: Request) -> EncodedPrompt:
        """The prompt for `answer`, which will find nothing wrong with it, but for its length where the method
        compresses it; ValueError for one that repeats the whole context, too."""
        encoded = self.encode(prompt, request)
        if self.repeats(encoded):
            raise ValueError(
                "the prompt begins with what the prefix holds, which would stand in the context twice; give "
                "only what follows it, or whole prompts with prefix=PrefixCache()"
            )
        if not self.setting.compresses:
            self.setting.check_length(self.llm.config, len(encoded.ids))
            self.check_room(self.setting.kept(len(encoded.ids)), request.max_new_tokens)
        return encoded

    # ---- prompts and turns of a chat ---------------------------------------------------------------------

    def encode(self, prompt: Prompt, request: Request | None = None) -> EncodedPrompt:
        """A prompt that is to be appended to the context; tools are those that a chat's first prompt has."""
        start, request = time.perf_counter(), request or Request()
        chat = request.chat or is_messages(prompt)
        if (request.tools or request.chat_template_kwargs) and not chat:
            raise ValueError("tools and chat_template_kwargs are for a chat template: they need chat=True")
        check_form(prompt)
        ids: Any = self._rendered(as_messages(prompt), request) if chat else prompt
        if isinstance(ids, str):
            ids = self.llm.tokenizer.encode(ids, add_special=self.length == 0 and not chat)
        else:
            self.check_ids_allowed()
        checked = checked_ids(ids, self.llm.config.vocab)
        return EncodedPrompt(prompt, checked, len(checked), chat, time.perf_counter() - start)

    def check_ids_allowed(self) -> None:
        if self.setting.compresses:
            raise TypeError(
                f"{type(self.setting).__name__} needs a prompt of text or messages, not of token ids"
            )

    def compressed(self, whole: EncodedPrompt, request: Request) -> EncodedPrompt:
        """The method's shorter form of a text, or of the users' messages in a chat."""
        start, compress = time.perf_counter(), self.setting.compress
        if isinstance(whole.prompt, str):
            short: Prompt = compress(self.llm, whole.prompt)
        else:
            short = as_messages(whole.prompt)
            for message in short:
                if message["role"] == "user":
                    message["content"] = compress(self.llm, message["content"])
        seconds = time.perf_counter() - start
        encoded = self.encode(short, request)
        return replace(encoded, prompt=whole.prompt, n_given=whole.n_given, compress_seconds=seconds)

    def repeats(self, encoded: EncodedPrompt) -> bool:
        """True if a prompt begins with all text or messages of the context."""
        prompt, ids = encoded.prompt, encoded.ids
        if is_messages(prompt):
            earlier = self.messages
            return bool(earlier) and list(prompt[: len(earlier)]) == earlier
        if 2 * len(ids) < self.length:
            return False
        if isinstance(prompt, str):  # whose ids may differ where the context ends
            text = self.llm.tokenizer.decode(self.core.ids.tolist())
            return bool(text) and self.llm.tokenizer.decode(ids).startswith(text)
        return self.length > 0 and ids[: self.length] == self.core.ids.tolist()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of all turns, with the answers."""
        return [
            message
            for turn in self.prompts
            if turn.messages
            for message in (*turn.messages, {"role": "assistant", "content": turn.text})
        ]

    def answered(self, begins: int, answer_begins: int, prompt: Prompt, text: str, tools: Tools) -> None:
        """Makes a turn of what has been run since `begins`, or renews it: its answer has gone on."""
        earlier = tuple(place for place in self.prompts if place.begins < begins)
        n_given = sum(place.n_given for place in self.prompts[len(earlier) :])
        messages, tools = as_messages(prompt), self._tools(tools)
        self.prompts = (*earlier, PromptPlace(begins, answer_begins - begins, n_given, messages, text, tools))

    def _tools(self, new: Tools) -> Tools:
        tools = self.prompts[0].tools if self.messages else new
        if new and list(new) != list(tools):
            raise ValueError("tools are those of the whole chat: other ones than its first prompt had")
        return tools

    def _rendered(self, new: list[dict[str, Any]], request: Request) -> str:
        """The text that the template renders for new messages after the chat so far: what follows a
        mark that stands for the last answer, which is in the context already."""
        if not all(place.messages for place in self.prompts) or (self.length and not self.prompts):
            raise ValueError(
                "a chat turn cannot follow part of a turn, or text that was read or run outside the chat; "
                "truncate the session to where that begins, give the text in a message of the chat's first "
                "turn (prefix=PrefixCache() reads once what several chats share) or ask without chat=True"
            )
        tokenizer = self.llm.tokenizer
        tools, variables = self._tools(request.tools), request.chat_template_kwargs
        mark = uuid4().hex  # in no message, whatever they say
        earlier = [*self.messages[:-1], {"role": "assistant", "content": mark}] if self.prompts else []
        text = tokenizer.chat_text([*earlier, *new], tools=tools, **variables)
        if not earlier:
            return text
        _, marked, tail = text.rpartition(mark)
        if not marked:
            raise ValueError(
                "the chat template leaves earlier answers out, so a follow-up cannot extend its chat"
            )
        last = self.core.drawn  # the answer's end token, in the context or to be run before the prompt
        if last is None and self.kinds[-1] == 1:
            last = int(self.core.ids[-1])
        if last not in self.llm.eos_token_ids:
            return tail
        return tail.removeprefix(tokenizer.decode([last], skip_special_tokens=False))

    # ---- passes, in `exclusive_use` ----------------------------------------------------------------------

    @contextmanager
    def exclusive_use(self) -> Iterator[None]:
        """Refuses a second caller. Before and after, prompts are brought in line with the context, which may
        have been truncated, or not have grown by a prompt whose pass failed."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this session is in use: another thread, a progress callback or a stream is running it; "
                "open one session for each"
            )
        try:
            self.settle_prompts()
            yield
        finally:
            try:
                self.settle_prompts()
            finally:
                self._lock.release()

    def settle_prompts(self) -> None:
        """Drops prompts that begin at the context's end or behind it, and cuts one that reaches beyond."""
        places = (place for place in self.prompts if place.begins < self.length)
        self.prompts = tuple(place.until(self.length) for place in places)

    def check_room(self, n_given: int, n_new: int) -> int:
        """The length with `n_given` and `n_new` more tokens; ValueError if it exceeds the model's context."""
        length = self.length + (self.core.drawn is not None)
        total, config = length + n_given + n_new, self.llm.config
        if total > config.context:
            raise ValueError(
                f"{length} tokens in the session, {n_given} given and {n_new} to be generated make {total}; "
                f"the model's context is {config.context}"
            )
        return total

    def reserve(self, n_given: int, n_new: int = 0) -> None:
        """Reserves buffers, then runs the token drawn last; an error beyond the context or free memory."""
        total = self.check_room(n_given, n_new)
        if total > self.room:
            self.room = reserve(self.core, total, self.llm.config.context, self.llm.device == "cpu")
        self.unfinished = None
        if self.core.drawn is not None:
            self.core.forward([self.core.drawn], generated=True)

    @contextmanager
    def prompt(self, ids: list[int], n_new: int, progress: bool) -> Iterator[int]:
        """Where a prompt of these ids begins, once memory is reserved, its beginning taken from `prefixes`
        and the schedule decided. If the pass in the block fails, nothing of the prompt is left."""
        self.reserve(len(ids), n_new)
        begins = self.length
        try:
            if self.prefixes is not None and not begins:
                self.prefixes.read(self, ids, n_new, progress)
            if (self.kinds == READ).all():
                self.pruning = self.setting.for_prompt(self.llm.config, begins + len(ids))
                if self.pruning != self.setting:
                    self.core.reschedule(self.pruning.core())
            yield begins
        except BaseException:
            if self.length < begins + len(ids):
                self.core.truncate(begins)
            raise

    def run_pass(self, run: Callable[..., T], ids: list[int], n_given: int | None, progress: bool) -> T:
        """The result of a pass over these ids; of a prompt of `n_given` tokens, unless that is None."""
        with prefill_watch(len(ids), self.llm.config.n_layers, progress) as watch:
            if n_given is not None:
                self.begin_prompt(n_given, len(ids))
            return run(ids, watch=watch)

    def begin_prompt(self, n_given: int, n_new: int) -> None:
        """Counts a prompt; called when nothing but the pass itself can fail."""
        self.prompts += (PromptPlace(self.length, n_new, n_given),)

    def forked_core(self) -> _core.Session:
        """A second core in the same state; MemoryError beyond the free memory."""
        if self.llm.device == "cpu":
            check_memory(self.core.fork_bytes, f"a fork of a session of {self.room} tokens")
        return self.core.fork()
