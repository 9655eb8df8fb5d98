"""A model of transformers that is in memory."""

import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lazyllm.checkpoints.checkpoint import Checkpoint
from lazyllm.llm import LLM, load


def from_transformers(model: Any, tokenizer: Any = None, **options: Any) -> LLM:
    """The LLM of a model of transformers that is in memory, such as a fine-tuned or a merged one.

    `save_pretrained` writes both to a temporary folder (TMPDIR says where), which is there as long as the LLM:
    what happens to `model` later changes nothing here. Without a tokenizer, prompts are token ids. The options
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
