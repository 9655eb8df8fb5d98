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
from lazyllm.pruning import DENSE
from lazyllm.stop_finder import StopFinder
from lazyllm.trace import Recorder

READ = 2  # of `Session.kinds`: prompt tokens read, with no pass since


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
        self._model, self.pruning = model, pruning
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
        self._n_read_before = int((self._core.kinds == READ).sum())

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
        for drawn in self.drawn[self._n_read :]:
            if not self._is_end(drawn.token):
                piece += self._finder.push(self._stream.push(drawn.token))
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
            token_ids=[drawn.token for drawn in self.drawn],
            prompt_ids=self.prompt_ids,
            n_given=self.encoded.n_given,
            ttft=self.drawn[0].seconds,
            seconds=self.drawn[-1].seconds,
            tokenize_seconds=self.encoded.tokenize_seconds,
            policy_seconds=self.recorder.policy_seconds,
            computed_series=np.array([drawn.computed for drawn in self.drawn]),
            reached_top_series=np.array([drawn.reached_top for drawn in self.drawn]),
            passes=self.recorder.counts(),
            recorded=self.recorder.trace(
                self._core.ids.tolist(),
                self._model.config.n_layers,
                self.pruning,
                self._model.tokenizer_if_any,
            ),
            pruning=self.pruning,
            finish_reason=finish_reason,
            speedup=self._speedup(),
            unpruned=self._unpruned(),
            seed=self._seed if self.request.sampling.temperature else None,
        )

    def _speedup(self) -> float | None:
        """Tokens that were read before count as if this prompt's pass had computed them."""
        assert self.begins is not None
        n_given = len(self.encoded.ids)
        n_context, n_new = self.begins + n_given, n_given + (self._n_read_before if self.begins else 0)
        counts = self.recorder.counts_at(self.prompt_end)
        if len(self.prompt_ids) == n_given and (counts[:, 0] == n_context).all():
            return 1.0
        counts[:, 1] = np.minimum(counts[:, 0], counts[:, 1] + self._n_read_before)
        config = self._model.config
        pruned = self.pruning.prefill_flops(config, n_new, counts)
        dense = DENSE.pass_flops(config, np.tile([n_context, n_new, 0], (config.n_layers, 1)))
        return None if pruned is None else dense / pruned

    def _unpruned(self) -> str:
        if self.pruning == DENSE or len(self.prompt_ids) < self.encoded.n_given or self.recorder.dropped:
            return ""
        return self.pruning.why_unpruned(int(self._core.n_prompt), int(self._core.length))
