"""Session: one growing context of one model, the only thing that changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lazyllm.generation import Generation, Request, Stream, answer
from lazyllm.memory import check_memory
from lazyllm.methods import Method, PromptCompression, RandomDrop
from lazyllm.progress import prefill_watch
from lazyllm.prompts import Given, Prompt, PromptIds, checked_ids, encoded
from lazyllm.pruning import Pruning
from lazyllm.trace import Recorder, Trace

if TYPE_CHECKING:
    from lazyllm.llm import LLM
    from lazyllm.sampling import SamplingParams

ANSWER_MARK = "lazyllm-answer-mark"
T = TypeVar("T")
LEAST_SPARE = 64  # tokens; beyond that, a context that grows bit by bit doubles its room


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` gives, and its seconds."""
    begun = time.perf_counter()
    return work(), time.perf_counter() - begun


class Session:
    """A context that grows by `forward` and `ask`; made by `LLM.session`. One thread at a time.

    A pass that was interrupted (Ctrl-C) or failed leaves the session unusable and the model as it was.
    """

    def __init__(self, llm: LLM, pruning: Method) -> None:
        pruning.check(llm.config)
        self.llm = llm
        self.pruning = pruning
        self.core = llm.core.session(pruning.core())
        self._room = 0  # tokens that the buffers hold
        self._n_prompts = 0
        self._n_given = 0  # prompt tokens, those counted that the method took out before the model
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
        """Layers that hold K,V of each token (under StaticPruning: that computed it)."""
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
        """How many of the prompt tokens given the method has let into the model."""
        return int(self.core.n_prompt) / self._n_given if self._n_given else 1.0

    @property
    def last_pass(self) -> np.ndarray:
        """Of the last pass, one row per layer: tokens in play, computed, revived."""
        return np.array(self.core.last_pass)

    # ---- adding to it ----------------------------------------------------------------------------

    def forward(self, ids: PromptIds, generated: bool = False, progress: bool = True) -> np.ndarray:
        """Runs new tokens, the user's or (generated=True) the model's: the logits (vocab,) of the last."""
        new = checked_ids(ids, self.llm.config.vocab)
        n_given = len(new)
        if not generated:
            self._refuse_ids()
            new = self.shortened(new)
        self.reserve(len(new), spare=max(LEAST_SPARE, self.length))
        self._run_pending()
        if not generated:
            self.note_prompt(n_given)
            self._leave_out(len(new))
        with prefill_watch(len(new), self.llm.config.n_layers, progress) as watch:
            logits = self.core.forward(new, generated=generated, watch=watch)
        self._token_ids += new
        return np.asarray(logits)

    def surprisal(self, ids: PromptIds, progress: bool = True) -> np.ndarray:
        """Runs new tokens of the user's: -ln p (n,) of each given all before it, NaN where nothing is before.

        For sessions without pruning.
        """
        if not isinstance(self.pruning, Pruning):
            raise ValueError(f"surprisal needs a session without pruning, not one with {self.pruning}")
        new = checked_ids(ids, self.llm.config.vocab)
        self.reserve(len(new), spare=max(LEAST_SPARE, self.length))
        self._run_pending()
        self.note_prompt(len(new))
        with prefill_watch(len(new), self.llm.config.n_layers, progress) as watch:
            surprisal = self.core.surprisal(new, watch=watch)
        self._token_ids += new
        return np.asarray(surprisal)

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
        made = Stream(answer(self, self.given(text, chat), request)).finished()
        if chat and isinstance(text, str):
            self._chat += [{"role": "user", "content": text}, {"role": "assistant", "content": made.text}]
        return made

    def given(self, text: Prompt, chat: bool) -> Given:
        """The next prompt, compressed if that is the method, and encoded."""
        ids, tokenize_seconds = timed(lambda: self._encoded(text, chat))
        if not isinstance(self.pruning, PromptCompression):
            return Given(ids, len(ids), tokenize_seconds)
        if not isinstance(text, str):
            self._refuse_ids()
        method, whole = self.pruning, str(text)
        short, compress_seconds = timed(lambda: method.compress(self.llm, whole))
        short_ids, tokenize_seconds = timed(lambda: self._encoded(short, chat))
        return Given(short_ids, len(ids), tokenize_seconds, compress_seconds)

    def _refuse_ids(self) -> None:
        if isinstance(self.pruning, PromptCompression):
            raise TypeError("PromptCompression needs a prompt of text, not of token ids")

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

    def shortened(self, prompt_ids: list[int]) -> list[int]:
        """What of the next prompt is run through the model: all, unless the method drops some before."""
        if not isinstance(self.pruning, RandomDrop) or self.pruning.original_positions:
            return prompt_ids
        return [prompt_ids[i] for i in self.pruning.positions(len(prompt_ids), self._n_prompts)]

    def note_prompt(self, n_given: int) -> None:
        """To be called before the pass over a prompt, once nothing but the pass itself can fail."""
        self._n_prompts += 1
        self._n_given += n_given

    def _leave_out(self, n_new: int) -> None:
        """Just before the pass over a prompt: of its tokens, those that leave a gap where they stood."""
        method = self.pruning
        if not isinstance(method, RandomDrop) or not method.original_positions:
            return
        dropped = np.setdiff1d(np.arange(n_new), method.positions(n_new, self._n_prompts - 1))
        if dropped.size:
            self.core.leave_out(self.length + dropped)

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
            self._leave_out(len(prompt_ids))
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
