"""LLM: a loaded model that answers prompts; `load` and `from_transformers` make one."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack, overload

from lazyllm import _core
from lazyllm.checkpoints.checkpoint import Checkpoint, resolve
from lazyllm.checkpoints.config import ModelConfig
from lazyllm.checkpoints.gguf_checkpoint import GgufCheckpoint
from lazyllm.checkpoints.tensors import rounded_bytes
from lazyllm.checkpoints.tokenizer import Tokenizer
from lazyllm.document import Document, costs
from lazyllm.errors import CheckpointError
from lazyllm.generation import Generation, Options, Request, Stream
from lazyllm.induction_head import find_induction_head
from lazyllm.machine.device import check_device, chosen_compute, open_model
from lazyllm.machine.memory import check_memory
from lazyllm.method import Method
from lazyllm.methods.parsing import PruningInput, as_method
from lazyllm.methods.speedup import Speedup
from lazyllm.prefix_cache import PrefixCache
from lazyllm.prompt import EncodedPrompt, Messages, Prompt, is_batch
from lazyllm.pruning import DENSE
from lazyllm.schedule import PROBED_ABOVE, SHAPE_LENGTH
from lazyllm.session import Session
from lazyllm.session_file import SessionFile
from lazyllm.support import checked
from lazyllm.support.files import user_path
from lazyllm.support.progress import bar
from lazyllm.support.signatures import names_its_options, takes

MAX_THREADS = 1024
Batch = Sequence[str] | Sequence[Sequence[int]] | Sequence[Messages]
Prefix = Session | PrefixCache | None


@names_its_options
def load(
    path: str | Path | Checkpoint,
    device: str = "auto",
    threads: int | None = None,
    compute: str = "f32",
    weights: str = "auto",
    kv: str = "f32",
    revision: str | None = None,
    file: str | None = None,
) -> LLM:
    """Opens a folder in Hugging Face layout, a GGUF file, a hub id where huggingface_hub is installed, or a
    checkpoint that is open already.

    `revision`: a branch, tag or commit of a hub id. `file`: the name of a GGUF file in the folder or hub repository,
    which is used in place of safetensors. `device`: auto, cpu, cuda or cuda:N; cuda:0,1 divides the layers between two
    GPUs. `weights`: auto (as stored, or q8 where they are not quantized and compute is int8), q8 (rounded to 8 bits:
    Q8_0), or q4 (the layers to 4 bits: Q4_1; the embedding and the LM head to 8). The remaining options are for the
    CPU. `threads`: None takes every physical core that this process may use. `compute`: the type of the operands of
    products, f32, bf16 or int8 where the processor has instructions for it, or fastest: bf16, else f32. int8 rounds
    activations and weights to 8 bits by groups of 32. `kv`: the type of keys and values, f32, f16 or bf16.
    """
    if isinstance(path, Checkpoint):
        checkpoint = path
    else:
        place = resolve(path, revision, file)
        checkpoint = GgufCheckpoint(place) if place.is_file() else Checkpoint(place)
    if threads is not None:
        threads = checked.whole(threads, "threads", 1, MAX_THREADS + 1)
    check_device(device)
    checked.choice(weights, "weights", ("auto", "q8", "q4"))
    checked.choice(kv, "kv", ("f32", "f16", "bf16"))
    compute = chosen_compute(compute, device)
    n_bytes = rounded_bytes(checkpoint.tensors, weights)
    if compute == "int8" and weights == "auto" and n_bytes is not None:
        weights = "q8"  # else every pass would round them again
    if n_bytes is not None and weights != "auto" and not device.startswith("cuda"):
        check_memory(n_bytes, f"{checkpoint.path} with weights={weights!r}")
    try:
        core = open_model(checkpoint, device, threads, compute, weights, kv)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    if changed := checkpoint.changed():
        raise OSError(f"{changed} was changed while it was loaded; load it again")
    return LLM(checkpoint, core, compute, weights, kv)


def from_transformers(model: Any, tokenizer: Any = None, **options: Any) -> LLM:
    """The LLM of a model of transformers that is in memory, such as a fine-tuned or a merged one.

    `save_pretrained` writes both to a temporary folder (TMPDIR says where), which exists as long as the LLM:
    later changes of `model` have no effect. Without a tokenizer, prompts are token ids. The options
    are `device`, `threads`, `compute`, `weights` and `kv` of `load`.
    """
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise TypeError(
            f"model must be a model of transformers such as AutoModelForCausalLM.from_pretrained(…), not {model!r:.80}"
        )
    if hasattr(model, "merge_and_unload"):
        raise TypeError("model has adapters of PEFT; give the model that model.merge_and_unload() returns")
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="lazyllm-"))
        for part in (model, tokenizer):
            if part is not None:
                part.save_pretrained(folder)
        checkpoint = Checkpoint(Path(folder))
        weakref.finalize(checkpoint, stack.pop_all().close)
    name = Path(model.config.name_or_path).name
    checkpoint.config = replace(checkpoint.config, name=name or checkpoint.config.architecture)
    return load(checkpoint, **options)


def checked_llm(llm: object) -> LLM:
    """`llm` itself; TypeError if it is no LLM, for example its path."""
    if isinstance(llm, LLM):
        return llm
    raise TypeError(f'llm must be an open model such as lazyllm.load("path"), not {llm!r}')


class PrefixedOptions(Options, total=False):
    prefix: Prefix


@dataclass(eq=False, repr=False)
class LLM:
    """A loaded model: configuration, weights and tokenizer of one checkpoint, which never change. It may be
    shared between threads: each answer is made in a session of its own."""

    checkpoint: Checkpoint
    core: _core.Model
    compute: str = "f32"
    weights: str = "auto"
    kv: str = "f32"

    def __post_init__(self) -> None:
        self.config = self.checkpoint.config
        self.device, self.threads = self.core.device, self.core.threads

    def __repr__(self) -> str:
        c = self.config
        threads = f", {self.threads} threads" if self.device == "cpu" else ""
        weights = f" in {self.weights}" if self.weights != "auto" else ""
        kv = f", K and V in {self.kv}" if self.core.kv != self.core.activations else ""
        return (
            f"<LLM {c.name or c.architecture}: {c.n_layers} layers of {c.hidden}, "
            f"{c.n_heads} heads ({c.n_kv_heads} KV), vocabulary {c.vocab}, context {c.context}, "
            f"{self.core.bytes / 2**20:.0f} MiB{weights} on {self.device} ({self.core.isa}{threads}{kv})>"
        )

    @property
    def tokenizer(self) -> Tokenizer:
        if self.checkpoint.tokenizer is None:
            raise CheckpointError(
                f"{self.checkpoint.path} has neither tokenizer.json nor tokenizer.model, nor a GGUF file's "
                "vocabulary; give token ids"
            )
        return self.checkpoint.tokenizer

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset((self.checkpoint.tokenizer or self.config).eos_token_ids)

    @cached_property
    def _probed(self) -> ModelConfig:
        return replace(self.config, induction_head=find_induction_head(self))

    def config_for(self, setting: Method | float) -> ModelConfig:
        """The configuration for a setting or speedup: with the induction head, found once, where it asks for one."""
        if isinstance(setting, Method):
            setting = setting.factor if isinstance(setting, Speedup) else 1.0
        return self._probed if setting > PROBED_ABOVE else self.config

    @names_its_options
    def session(
        self, pruning: PruningInput = None, prefix: PrefixCache | None = None, progress: bool = True
    ) -> Session:
        """A new, empty session; `pruning=None` is dense. Its first prompt takes its beginning from `prefix`, as
        far as an earlier prompt began alike."""
        method = as_method(pruning)
        config = self.config_for(method)
        method.check(config)
        if prefix is not None and not method.reads_in_parts:
            raise ValueError(f"prompts cannot be read in parts, as prefix={prefix!r} asks, with {method}")
        if message := method.mismatch(self.checkpoint, progress):
            warnings.warn(message, stacklevel=2)
        rules = method.for_prompt(config, SHAPE_LENGTH).core()
        if rules and rules["words"] and self.checkpoint.tokenizer is not None:
            self.core.know_words(self.checkpoint.tokenizer.word_parts)
        return Session(self, method, method, self.core.session(rules), prefix)

    def restore(self, file: str | Path, pruning: PruningInput = None, progress: bool = True) -> Session:
        """The session that `Session.save` wrote to this file; ValueError for one of another model, compute,
        weights, kv or setting. `pruning` is needed where it is code: a policy, or a method of your own."""
        saved = SessionFile(user_path(file))
        method = saved.method_for(self, None if pruning is None else as_method(pruning), progress)
        session = self.session(method, progress=progress)
        saved.fill(session)
        return session

    @names_its_options
    def document(
        self, text: str, pruning: PruningInput = None, chat: bool = False, questions: int = 1, progress: bool = True
    ) -> Document:
        """Reads a text once, for many questions, each answered as if text and question were one prompt.

        With `chat` the prompt is the user's turn of the chat template. With pruning, reading takes a part of a
        dense prefill, and each question another; if dense takes less for so many `questions`, the document is dense.
        """
        if not isinstance(text, str) or not text:
            raise TypeError(f"a document must be text that is not empty, not {text!r:.80}")
        setting, questions = as_method(pruning), checked.whole(questions, "questions", 1)
        *_, break_even = costs(self, setting, len(self.tokenizer.encode(text)))
        if break_even and questions >= break_even:
            setting = DENSE
        return Document(self, self.session(setting, progress=progress), text, chat, progress)

    def restore_document(self, file: str | Path, progress: bool = True) -> Document:
        """The document that `Document.save` wrote to this file."""
        session = self.restore(file, progress=progress)
        if session.document is None:
            raise ValueError(f"{file} is a session without a document; restore opens it")
        return Document(self, session, **session.document)

    @overload
    def generate(
        self, prompt: Any, pruning: PruningInput = None, *, n: int, **options: Unpack[PrefixedOptions]
    ) -> Any: ...
    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self, prompt: Prompt, pruning: PruningInput = None, **options: Unpack[PrefixedOptions]
    ) -> Generation: ...
    @overload
    def generate(
        self, prompt: Batch, pruning: PruningInput = None, **options: Unpack[PrefixedOptions]
    ) -> list[Generation]: ...
    @takes(Request, "never_first")
    def generate(
        self,
        prompt: Any,
        pruning: PruningInput = None,
        *,
        n: int = 1,
        prefix: Prefix = None,
        **options: Unpack[Options],
    ) -> Any:
        """The answer to a prompt, or answers to a list of prompts, each in a session of its own.

        A prompt is text, token ids, or a list of messages such as `[{"role": "system", "content": …},
        {"role": "user", "content": …}]`, with contents of text or parts such as `{"type": "text", "text":
        …}`; `chat=True` makes plain text the user's turn of the chat template, which `chat_template_kwargs`
        give further variables such as `{"enable_thinking": False}`. An answer ends at the checkpoint's end
        token or one of `stop_token_ids`, before the first of the `stop` strings, or after `max_new_tokens`.
        The default `sampling` is greedy; with a seed the prompts of a list draw with that seed, the next one,
        and so on. With `n` above 1 each prompt runs once and gets a list of `n` answers. `logprobs`: how
        many log probabilities to record for each new token. `trace` records tokens in play and their scores.
        `tools` are JSON schemas of functions for chat templates that know tools. `prefix` is a session that
        has read what precedes all prompts; each continues a fork of it, with its setting. Or it is a
        `PrefixCache`: the beginning that a whole prompt shares with an earlier one is not read again.

        All prompts of a list are checked before the first is run. If one fails later, or Ctrl-C stops the
        run, the answers made so far are the exception's attribute `finished`. The unfinished answer is its
        `generation`, and the `resume()` of its `session` continues it.
        """
        request = Request(**options)
        sampling, progress = request.sampling, request.progress
        if checked.whole(n, "n", 1) > 1 and not sampling.temperature:
            raise ValueError(f"n={n} answers differ only with sampling=SamplingParams(temperature=…) above 0")
        session = self._continued(pruning, prefix, progress)
        if not is_batch(prompt):
            return session.answers(session.checked_prompt(prompt, request), request, n)
        encoded: list[EncodedPrompt] = []
        answers: list[Any] = []
        try:
            for i, item in enumerate(prompt):
                try:
                    encoded.append(session.checked_prompt(item, request))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"prompt {i}: {error}") from None
            with bar(len(prompt), "prompts", "prompt", progress and len(prompt) > 0) as line:
                for i, item in enumerate(encoded):
                    quiet = replace(request, progress=False, sampling=sampling.for_prompt(i))
                    answers.append(session.fork().answers(item, quiet, n))
                    line.update()
        except BaseException as error:
            error.finished = answers  # type: ignore[attr-defined]
            error.add_note(f"{len(answers)} of {len(prompt)} answers are in this exception's `finished`.")
            raise
        return answers

    @takes(Request, "never_first")
    def stream(
        self, prompt: Prompt, pruning: PruningInput = None, *, prefix: Prefix = None, **options: Unpack[Options]
    ) -> Stream:
        """Like `generate` for one prompt: an iterator over the text, which sets `generation` at its end."""
        if is_batch(prompt):
            raise TypeError("stream takes one prompt; give a list of prompts to generate")
        request = Request(**options)
        session = self._continued(pruning, prefix, request.progress)
        return session.answer(session.checked_prompt(prompt, request), request)

    def _continued(self, pruning: PruningInput, prefix: Prefix, progress: bool) -> Session:
        """The session that prompts continue: a fork of the prefix, or a new one."""
        if prefix is None or isinstance(prefix, PrefixCache):
            return self.session(pruning, prefix, progress)
        if not isinstance(prefix, Session) or prefix.llm is not self:
            raise ValueError(f"prefix must be a session of this model or a PrefixCache, not {prefix!r}")
        if pruning is not None and as_method(pruning) != prefix.setting:
            raise ValueError(f"pruning is {pruning!r}, but the prefix was read with {prefix.setting}")
        return prefix.fork()
