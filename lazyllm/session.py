"""Session: one growing context of one model; models and settings themselves never change."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np

from lazyllm import _core
from lazyllm.answer import Answer
from lazyllm.generation import Generation, Options, Request, Stream
from lazyllm.method import Method
from lazyllm.model import Model
from lazyllm.prompt import EncodedPrompt, Prompt, PromptIds, checked_ids
from lazyllm.pruning import DENSE
from lazyllm.schedule import SHAPE_LENGTH
from lazyllm.session_file import write
from lazyllm.support.files import user_path
from lazyllm.support.signatures import takes
from lazyllm.timeline import Prefixes, Timeline


class Session(Timeline):
    """A context that grows by `forward` and `ask`; made by `LLM.session`. It serves one thread at a time.

    A pass that is interrupted (Ctrl-C) or fails leaves the session as it was. An answer is many passes: the
    exception that interrupts one has what there is of it as `generation`, and `resume` goes on.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        prefixes: Prefixes | None = None,
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
        super().__init__(model, method, core, prefixes)

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
        return Stream(self._begun(prompt, request).run(self))

    def answers(self, prompt: EncodedPrompt, request: Request, n: int) -> Generation | list[Generation]:
        """The answer; with `n` above 1 a list of as many, for which the prompt runs once: each goes on in a
        fork, with a seed of its own."""
        if n == 1:
            return self.answer(prompt, request).finished()
        answer = self._begun(prompt, request)
        answer.prefill(self)
        forks = (self.fork() for _ in range(n))
        return [Stream(answer.branch(fork, i).run(fork)).finished() for i, fork in enumerate(forks)]

    def _begun(self, prompt: EncodedPrompt, request: Request) -> Answer:
        """An answer whose prompt the method has compressed, if it does, and nothing has run."""
        if self.setting.compresses:
            prompt = self.compressed(prompt, request)
        return Answer(self, prompt, request)

    def resume(self) -> Generation:
        """The whole of the answer that was interrupted, as if it had not been; only while nothing else has
        been done to the session since: no other prompt, `forward` or `truncate`."""
        if not isinstance(self.unfinished, Answer):
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
