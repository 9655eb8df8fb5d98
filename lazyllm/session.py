"""Session: one growing context of one model, the only thing that changes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from lazyllm.generation import Generation, Request, Stream, answer
from lazyllm.memory import check_memory
from lazyllm.progress import prefill_watch
from lazyllm.prompts import Prompt, PromptIds, checked_ids, encoded
from lazyllm.trace import Recorder, Trace

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.pruning import Pruning
    from lazyllm.sampling import SamplingParams

ANSWER_MARK = "lazyllm-answer-mark"
LEAST_SPARE = 64  # tokens; beyond that, a context that grows bit by bit doubles its room


class Session:
    """A context that grows by `forward` and `ask`; made by `LLM.session`. One thread at a time.

    A pass that was interrupted (Ctrl-C) or failed leaves the session unusable and the model as it was.
    """

    def __init__(self, llm: LLM, pruning: Pruning) -> None:
        pruning.check(llm.config)
        self.llm = llm
        self.pruning = pruning
        self.core = llm.core.session(pruning.core())
        self._room = 0  # tokens that the buffers hold
        self._token_ids: list[int] = []
        self._pending: list[int] = []  # generated, not yet run through the model
        self._chat: list[dict[str, str]] = []

    def __repr__(self) -> str:
        return f"<Session of {self.llm.config.name or 'a model'}: {self.length} tokens, {self.pruning}>"

    # ---- what has happened so far ----------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens run through the model."""
        return int(self.core.length)

    @property
    def depths(self) -> np.ndarray:
        """Layers that hold K,V of each token."""
        return np.array(self.core.depths)

    @property
    def kinds(self) -> np.ndarray:
        """0 for prompt tokens, 1 for generated ones."""
        return np.array(self.core.kinds)

    @property
    def computed(self) -> float:
        """Share of (prompt token, layer) pairs computed so far."""
        return float(self.core.computed)

    @property
    def reached_top(self) -> float:
        """Share of prompt tokens computed in the last layer so far."""
        return float(self.core.reached_top)

    @property
    def last_pass(self) -> np.ndarray:
        """Of the last pass, one row per layer: tokens in play, computed, revived."""
        return np.array(self.core.last_pass)

    # ---- adding to it ----------------------------------------------------------------------------

    def forward(self, ids: PromptIds, generated: bool = False, progress: bool = True) -> np.ndarray:
        """Runs new tokens, the user's or (generated=True) the model's: the logits (vocab,) of the last."""
        new = checked_ids(ids, self.llm.config.vocab)
        self.reserve(len(new), spare=max(LEAST_SPARE, self.length))
        self._run_pending()
        with prefill_watch(len(new), self.llm.config.n_layers, progress) as watch:
            logits = self.core.forward(new, generated=generated, watch=watch)
        self._token_ids += new
        return np.asarray(logits)

    def ask(
        self,
        text: Prompt,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        stop: str | Iterable[str] = (),
        chat: bool = False,
        trace: bool = False,
        progress: bool = True,
    ) -> Generation:
        """A question on the context so far; with chat=True as the user's next turn of the chat template."""
        request = Request.checked(max_new_tokens, sampling, stop, trace, progress)
        begun = time.perf_counter()
        ids = self._encoded(text, chat)
        tokenize_seconds = time.perf_counter() - begun
        made = Stream(answer(self, ids, request, tokenize_seconds)).finished()
        if chat and isinstance(text, str):
            self._chat += [{"role": "user", "content": text}, {"role": "assistant", "content": made.text}]
        return made

    def _encoded(self, text: Prompt, chat: bool) -> list[int]:
        llm = self.llm
        if self.length == 0 or not isinstance(text, str):
            return encoded(text, llm, chat)
        follow_up = self._next_turn(text) if chat else text
        return checked_ids(llm.tokenizer.encode(follow_up, add_special=False), llm.config.vocab)

    def _next_turn(self, text: str) -> str:
        """What the chat template puts after the last answer: found by rendering a mark in its place."""
        tokenizer = self.llm.tokenizer
        turn = {"role": "user", "content": text}
        if not self._chat:
            return tokenizer.apply_chat_template([turn], tokenize=False)
        chat = [*self._chat[:-1], {"role": "assistant", "content": ANSWER_MARK}, turn]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
        _, found, tail = rendered.rpartition(ANSWER_MARK)
        if not found:
            raise ValueError(
                "the chat template leaves earlier answers out, so a follow-up cannot extend its chat"
            )
        ended = next((token for token in self._pending if token in self.llm.eos_token_ids), None)
        if ended is not None:
            tail = tail.removeprefix(tokenizer.decode([ended], skip_special_tokens=False))
        return tail

    # ---- for the loop that makes answers ---------------------------------------------------------

    def reserve(self, n_given: int, n_new: int = 0, spare: int = 0) -> None:
        """Room for more tokens: ValueError past the model's context, MemoryError past what is free."""
        if self.length != len(self._token_ids):
            raise RuntimeError("an earlier pass of this session did not finish; open a new session")
        length = self.length + len(self._pending)
        total, config = length + n_given + n_new, self.llm.config
        if total > config.context:
            note = f" ({config.context_note})" if config.context_note else ""
            raise ValueError(
                f"{length} tokens in the session, {n_given} given and {n_new} to be generated make {total}; "
                f"the model's context is {config.context}{note}"
            )
        if total > self._room:
            room = min(config.context, total + spare)
            if self.llm.device == "cpu":  # other devices refuse by themselves; this one would overcommit
                check_memory(config, room)
            self.core.reserve(room)
            self._room = room

    def recorder(self, traced: bool) -> Recorder:
        return Recorder(self.core, traced)

    def trace(self, recorder: Recorder) -> Trace | None:
        return recorder.trace(
            self._token_ids, self.llm.config.n_layers, self.pruning, self.llm.tokenizer_if_any
        )

    def advance(
        self, prompt_ids: list[int] | None, sampler: Any, recorder: Recorder, watch: Any = None
    ) -> int:
        """Runs the prompt, or else the id generated last, and draws the next id."""
        if prompt_ids is not None:
            self._run_pending(recorder)
        new = self._pending if prompt_ids is None else prompt_ids
        self._pending = []  # before the pass: an interrupt after it must not run them again
        token = int(self.core.advance(new, sampler, generated=prompt_ids is None, watch=watch))
        recorder.passed(generated=prompt_ids is None)
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
