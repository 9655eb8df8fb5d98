"""Answer: what one answer has come to, token by token; it can be interrupted and go on later."""

from __future__ import annotations

from secrets import randbits
from typing import NamedTuple

import numpy as np

from lazyllm import _core
from lazyllm.generation import FinishReason, Generation, Request
from lazyllm.method import Method
from lazyllm.model import Model
from lazyllm.prompt import EncodedPrompt, Prompt
from lazyllm.stop_finder import StopFinder
from lazyllm.trace import Recorder


class Drawn(NamedTuple):
    """A new token, with `Session.computed` and `reached_top` and the seconds since the answer began."""

    token: int
    computed: float
    reached_top: float
    seconds: float


class Answer:
    """One answer under way in a session; the session's `core` runs it.

    `prompt_ids` are those that the model reads, once the answer has been started. `begins` is the position of
    the first of them, once the token generated before has been run.
    """

    prompt_ids: list[int]
    recorder: Recorder

    def __init__(
        self,
        model: Model,
        pruning: Method,
        prompt: Prompt,
        encoded: EncodedPrompt,
        request: Request,
        chat: bool,
    ) -> None:
        self._model, self._pruning = model, pruning
        self.prompt, self.encoded, self.request, self.chat = prompt, encoded, request, chat
        self.started = False
        self.begins: int | None = None
        self.seconds = encoded.compress_seconds  # spent on it so far
        self.drawn: list[Drawn] = []
        sampling = request.sampling
        self._seed = randbits(63) if sampling.seed is None else sampling.seed
        self.sampler = _core.Sampler(sampling.temperature, sampling.top_p, sampling.top_k, self._seed)
        self.read_anew()

    def start(self, core: _core.Session, prompt_ids: list[int]) -> None:
        self.started = True
        self._core = core
        self.prompt_ids = prompt_ids
        self.recorder = Recorder(self._core, self.request.trace)

    @property
    def prompt_end(self) -> int:
        """The position behind the prompt, whose place must be known."""
        assert self.begins is not None
        return self.begins + len(self.prompt_ids)

    @property
    def complete(self) -> bool:
        """True if no token is to follow those read."""
        return len(self.drawn) == self.request.max_new_tokens or self._stopped

    @property
    def _stopped(self) -> bool:
        return self._finder.stopped or bool(self.drawn and self._is_end(self.drawn[-1].token))

    def _is_end(self, token: int) -> bool:
        return token in self._model.eos_token_ids or token in self.request.stop_ids

    # ---- its text --------------------------------------------------------------------------------

    def read_anew(self) -> None:
        """Forgets the text, of which an interrupted call may have lost a piece."""
        tokenizer = self._model.tokenizer_if_any
        self._stream = tokenizer.stream() if tokenizer else None
        self._finder = StopFinder(self.request.stop)
        self._n_read = 0
        self.text = ""

    def read(self) -> str:
        """The text that the tokens since the last call have made certain."""
        if self._stream is None:
            return ""
        piece = ""
        for one in self.drawn[self._n_read :]:
            if not self._is_end(one.token):
                piece += self._finder.push(self._stream.push(one.token))
        self._n_read = len(self.drawn)
        if self.complete:
            piece += self._finder.push(self._stream.finish()) + self._finder.finish()
        self.text += piece
        return piece

    # ---- the whole -------------------------------------------------------------------------------

    def generation(self) -> Generation:
        """The answer as far as it has come, of one token at least."""
        finish_reason: FinishReason = "interrupted"
        if self.complete:
            finish_reason = "stop" if self._stopped else "length"
        return Generation(
            text=self.text,
            token_ids=[one.token for one in self.drawn],
            prompt_ids=self.prompt_ids,
            n_given=self.encoded.n_given,
            ttft=self.drawn[0].seconds,
            seconds=self.drawn[-1].seconds,
            tokenize_seconds=self.encoded.tokenize_seconds,
            policy_seconds=self.recorder.policy_seconds,
            computed_series=np.array([one.computed for one in self.drawn]),
            reached_top_series=np.array([one.reached_top for one in self.drawn]),
            passes=self.recorder.counts(),
            recorded=self.recorder.trace(
                self._core.ids.tolist(),
                self._model.config.n_layers,
                self._pruning,
                self._model.tokenizer_if_any,
            ),
            pruning=self._pruning,
            finish_reason=finish_reason,
            seed=self._seed if self.request.sampling.temperature else None,
        )
