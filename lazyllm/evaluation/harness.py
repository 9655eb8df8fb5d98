"""HarnessModel: the model type `lazyllm` of EleutherAI's lm-evaluation-harness.

The harness has a registry of model types but no plugins: importing this module registers the type. The
command `lazyllm lm-eval` imports it and then runs the harness' own command.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lazyllm
from lazyllm.llm import LLM, load
from lazyllm.methods.parsing import PruningInput, as_method
from lazyllm.prefix_cache import PrefixCache
from lazyllm.sampling import SamplingParams, log_softmax
from lazyllm.support import checked
from lazyllm.support.progress import bar

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    raise ImportError(
        f"lazyllm.evaluation.harness needs the lm-evaluation-harness: pip install 'lazyllm-engine[lm-eval]' ({error})"
    ) from None

logger = logging.getLogger(__name__)

MAX_NEW_TOKENS = 256  # of a task without a limit, as in the harness' own models
SAMPLING = ("temperature", "top_p", "top_k")
Tokenized = tuple[tuple[str, str], list[int], list[int]]  # context and continuation, and the ids of both
Scored = tuple[float, bool]  # ln p of a continuation, and whether greedy decoding generates it


class HarnessModel(TemplateLM):  # type: ignore[misc]  # Any to mypy, which does not look into the harness
    """One model under one setting, as the harness calls it.

    `pretrained` is a folder, a hub id or an open LLM; `pruning` is a method, its text for `parse_method`, or
    its parsed JSON; `options` are those of `load`. Texts of more than `max_length` tokens, by default the
    model's context, lose their beginning. `seed` is that of sampled answers. Requests run one by one at any
    batch size; a beginning that their prompts share is read once.
    """

    def __init__(
        self,
        pretrained: str | LLM,
        pruning: PruningInput = None,
        max_length: int | None = None,
        seed: int = 0,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.pruning, self.seed = as_method(pruning), seed
        if self.pruning.compresses:
            raise ValueError("the harness does not say what to compress of a prompt; lazyllm longbench runs it")
        self.llm = pretrained if isinstance(pretrained, LLM) else load(pretrained, **options)
        self.pruning.check(self.llm.config_for(self.pruning))
        self.prefixes = PrefixCache() if self.pruning.reads_in_parts else None
        context = self.llm.config.context
        self.max_length = checked.whole(max_length or context, "max_length", 2, context + 1)

    def get_model_info(self) -> dict[str, Any]:
        """Facts that the harness stores with its results."""
        return {
            "pruning": self.pruning.to_json(),
            "lazyllm_version": lazyllm.__version__,
            "model_device": self.llm.device,
            "model_max_length": self.max_length,
        }

    @property
    def eot_token_id(self) -> int:
        tokenizer = self.llm.tokenizer
        if not tokenizer.eos_token_ids:
            raise ValueError(f"{tokenizer.place} names no end token, and this task needs one")
        return tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, or else an end token."""
        begin = self.llm.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_options: Any) -> list[int]:
        """Token ids. A text that begins with BOS, as rendered chats do, gets no second one."""
        tokenizer = self.llm.tokenizer
        if add_special_tokens is None:
            begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
            bos = tokenizer.decode(begin, skip_special_tokens=False)
            add_special_tokens = not (bos and string.startswith(bos))
        return tokenizer.encode(string, add_special=add_special_tokens)

    def cut(self, ids: list[int], room: int) -> list[int]:
        """The last `room` tokens."""
        if len(ids) > room:
            logger.warning("a text of %d tokens loses its first %d", len(ids), len(ids) - room)
        return ids[-room:]

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.tokenizer.place).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The text of the template that chats are rendered with."""
        if isinstance(chat_template, str):
            raise ValueError(f"apply_chat_template is {chat_template!r}; only the default template is known")
        template = self.llm.tokenizer.template
        return template.text if chat_template and template else None

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """A chat as text. Without `add_generation_prompt` its end is open: the last message is continued."""
        text = self.llm.tokenizer.chat_text(chat_history, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"])
        before, message, after = text.rpartition(last.strip())
        if not message:
            raise ValueError("the chat template does not show the last message, so it cannot be continued")
        blanks = last[len(last.rstrip()) :]
        return before + message + (blanks if after.startswith(blanks) else "")

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each cut before its first stop string."""
        answers = []
        with bar(len(requests), "generate_until", "request", not disable_tqdm) as line:
            for number, request in enumerate(requests):
                answers.append(self._answer(number, *request.args))
                self.cache_hook.add_partial("generate_until", request.args, answers[-1])
                line.update()
        return answers

    def _answer(self, number: int, context: str, options: dict[str, Any]) -> str:
        sampling = dict(normalize_gen_kwargs(options, MAX_NEW_TOKENS))
        stop, n_new = sampling.pop("until"), sampling.pop("max_gen_toks")
        sampling.pop("do_sample")  # implied by temperature
        if sampling.get("num_beams") == 1:
            del sampling["num_beams"]
        checked.known_names(sampling, SAMPLING, "sampling in the harness")
        if n_new >= self.max_length:
            raise ValueError(f"max_gen_toks must be below max_length ({self.max_length}), not {n_new}")
        return self.llm.generate(
            self.cut(self.tok_encode(context), self.max_length - n_new),
            pruning=self.pruning,
            max_new_tokens=n_new,
            sampling=SamplingParams(seed=self.seed + number, **sampling),
            stop=[text for text in stop if text],
            prefix=self.prefixes,
            progress=False,
        ).text

    def _loglikelihood_tokens(
        self, requests: Sequence[Tokenized], disable_tqdm: bool = False, **_options: Any
    ) -> list[Scored]:
        """Scores continuations: the context is the prompt and is pruned, the continuation is teacher-forced.

        Requests with one context share its pass.
        """
        shared: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                n_tokens, most = len(continuation), f"{self.max_length}, which is max_length"
                raise ValueError(f"a continuation has {n_tokens} tokens; it must have 1 to {most}")
            # the last token of the continuation is scored but not run
            prompt = self.cut(context, self.max_length + 1 - len(continuation))
            shared.setdefault(tuple(prompt), []).append(index)
        answers: list[Scored] = [(0.0, True)] * len(requests)
        with bar(len(requests), "loglikelihood", "request", not disable_tqdm) as line:
            for prompt_ids, members in shared.items():
                session = self.llm.session(self.pruning, self.prefixes, progress=False)
                first = session.forward(prompt_ids, progress=False)
                for index in members:
                    texts, _, tokens = requests[index]
                    branch = session.fork() if len(tokens) > 1 else session
                    logits = [first, *(branch.forward([token], generated=True) for token in tokens[:-1])]
                    ln_p = [float(log_softmax(row)[token]) for row, token in zip(logits, tokens, strict=True)]
                    greedy = all(row.argmax() == token for row, token in zip(logits, tokens, strict=True))
                    answers[index] = sum(ln_p), greedy
                    self.cache_hook.add_partial("loglikelihood", texts, answers[index])
                    line.update()
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        raise ValueError("this task scores every token of a text, so there is no prompt to prune: use --model hf")


def main(arguments: Sequence[str]) -> None:
    """Runs the harness' command with these arguments."""
    before = sys.argv
    sys.argv = ["lm-eval", *arguments, *default_device(arguments)]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def default_device(arguments: Sequence[str]) -> list[str]:
    """Options that replace the harness' default device, cuda:0, by lazyllm's own default; none if a device or
    a config file is given, or the model is of another type."""
    is_lazyllm = "lazyllm" in arguments or "--model=lazyllm" in arguments
    chosen = any(argument.startswith(("--dev", "--config", "-C")) for argument in arguments)
    return ["--device", "auto"] if is_lazyllm and not chosen else []


register_model("lazyllm")(HarnessModel)
