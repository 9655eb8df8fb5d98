"""LLM: a loaded model, which never changes; and `load`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from lazyllm import _core
from lazyllm.checkpoint import Checkpoint, resolve
from lazyllm.device import check_device, open_model
from lazyllm.generation import Generation, Request, Stream, answer
from lazyllm.methods import Method
from lazyllm.progress import bar
from lazyllm.prompts import Prompt, PromptIds, is_batch
from lazyllm.pruning import Pruning
from lazyllm.sampling import SamplingParams
from lazyllm.session import Session
from lazyllm.tokenizer import TextStream, Tokenizer

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
MOST_THREADS = 1024


def load(path: str | Path, device: str = "auto", dtype: str = "auto", threads: int | None = None) -> LLM:
    """Opens a folder in Hugging Face layout, or a hub id where huggingface_hub is installed.

    `device`: auto, cpu, cuda or cuda:N. `dtype`: auto or the one that the checkpoint stores, which is used as
    it is. `threads`, on the CPU: None takes every core that this process may use.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"path must be a folder or a hub id, not {path!r}")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
        raise TypeError(f"threads must be a whole number or None, not {threads!r}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"threads must be 1 to {MOST_THREADS}, or None for all cores, not {threads}")
    check_device(device)
    checkpoint = Checkpoint(resolve(path))
    _check_dtype(dtype, checkpoint)
    return LLM(checkpoint, open_model(checkpoint, device, threads))


def _check_dtype(dtype: str, checkpoint: Checkpoint) -> None:
    stored = sorted({DTYPES.get(tensor[1], tensor[1]) for tensor in checkpoint.tensors})
    if dtype != "auto" and [dtype] != stored:
        raise ValueError(
            f"dtype must be auto or the stored one, not {dtype!r}: {checkpoint.folder} stores "
            f"{', '.join(stored)}, and weights are used as stored"
        )


class Options(TypedDict, total=False):
    """What `generate` takes besides prompt and pruning."""

    max_new_tokens: int
    sampling: SamplingParams | None
    stop: str | Iterable[str]
    chat: bool
    trace: bool
    progress: bool


class LLM:
    """A loaded model: safe to share between threads, each answer being made in a session of its own."""

    def __init__(self, checkpoint: Checkpoint, core: _core.Model) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.core = core

    def __repr__(self) -> str:
        c = self.config
        return (
            f"<LLM {c.name or c.architecture}: {c.n_layers} layers of {c.hidden}, {c.n_heads} heads "
            f"({c.n_kv_heads} KV), vocabulary {c.vocab}, context {c.context}, "
            f"{self.core.bytes / 2**20:.0f} MiB on {self.device} ({self._kernels()})>"
        )

    def _kernels(self) -> str:
        return f"{self.core.isa}, {self.threads} threads" if self.device == "cpu" else self.core.isa

    @property
    def device(self) -> str:
        return self.core.device

    @property
    def threads(self) -> int:
        return self.core.threads

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.checkpoint.folder, self.config)

    @cached_property
    def tokenizer_if_any(self) -> Tokenizer | None:
        """None for a folder without tokenizer files, which token ids can still be given to."""
        if any((self.checkpoint.folder / name).exists() for name in TOKENIZER_FILES):
            return self.tokenizer
        return None

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        tokenizer = self.tokenizer_if_any
        return frozenset(tokenizer.eos_token_ids if tokenizer else self.config.eos_token_ids)

    def text_stream(self) -> TextStream | None:
        tokenizer = self.tokenizer_if_any
        return TextStream(tokenizer) if tokenizer else None

    def session(self, pruning: Method | None = None) -> Session:
        """A new, empty context; None is dense."""
        if pruning is not None and not isinstance(pruning, Method):
            raise TypeError(
                "pruning must be a lazyllm.Pruning or None, a RandomDrop, a StaticPruning or a "
                f"PromptCompression, not {pruning!r}"
            )
        return Session(self, pruning or Pruning())

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self, prompt: str | Sequence[int], pruning: Method | None = None, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]],
        pruning: Method | None = None,
        **options: Unpack[Options],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        pruning: Method | None = None,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        stop: str | Iterable[str] = (),
        chat: bool = False,
        trace: bool = False,
        progress: bool = True,
    ) -> Generation | list[Generation]:
        """The answer to a prompt (text or token ids), or answers to a list, each in a session of its own.

        Ends at the checkpoint's end token, before the first of the `stop` strings, or after `max_new_tokens`.
        The default `sampling` is greedy. `chat` makes the text the user's turn of the chat template. `trace`
        keeps which tokens were in play and their scores. `progress` shows bars for lists and long prompts.
        """
        request = Request.checked(max_new_tokens, sampling, stop, trace, progress)
        if not is_batch(prompt):
            return self._stream(prompt, pruning, request, chat).finished()
        quiet = replace(request, progress=False)
        answers = []
        with bar(len(prompt), "prompts", "prompt", progress) as line:
            for one in prompt:
                answers.append(self._stream(one, pruning, quiet, chat).finished())
                line.update()
        return answers

    def stream(
        self,
        prompt: str | PromptIds,
        pruning: Method | None = None,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        stop: str | Iterable[str] = (),
        chat: bool = False,
        trace: bool = False,
        progress: bool = True,
    ) -> Stream:
        """As `generate` for one prompt, but an iterator of pieces of text, with `generation` at its end."""
        if is_batch(prompt):
            raise TypeError("stream takes one prompt; give a list of prompts to generate")
        return self._stream(
            prompt, pruning, Request.checked(max_new_tokens, sampling, stop, trace, progress), chat
        )

    def _stream(self, prompt: Any, pruning: Method | None, request: Request, chat: bool) -> Stream:
        session = self.session(pruning)
        return Stream(answer(session, session.given(prompt, chat), request))
