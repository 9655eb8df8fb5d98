"""A model of transformers that is in memory."""

import os
import weakref
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lazyllm.checkpoints.checkpoint import SINGLE_FILE, Checkpoint, header_bytes
from lazyllm.errors import CheckpointError
from lazyllm.llm import LLM, load
from lazyllm.machine.memory import check_memory
from lazyllm.support.optional import package

DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


def from_transformers(model: Any, tokenizer: Any = None, **options: Any) -> LLM:
    """The LLM of a model of transformers that is in memory, such as a fine-tuned or a merged one.

    Its weights are copied, in memory, as they are now: what happens to `model` later changes nothing here.
    Without a tokenizer, prompts are token ids. The options are `device`, `threads`, `compute`, `weights` and
    `kv` of `load`.
    """
    return load(in_memory(model, tokenizer), **options)


def in_memory(model: Any, tokenizer: Any) -> Checkpoint:
    """The checkpoint that `save_pretrained` of both would write, its weights in a file that is memory only.

    The weights are those of this moment. The other files are in a temporary folder until the checkpoint is
    deleted.
    """
    if not hasattr(model, "state_dict") or not hasattr(model, "config"):
        raise TypeError(
            f"model must be a model of transformers such as AutoModelForCausalLM.from_pretrained(…), not {model!r:.80}"
        )
    if hasattr(model, "merge_and_unload"):
        raise TypeError("model has adapters of PEFT; give the model that model.merge_and_unload() returns")
    torch, weights = package("torch", "from_transformers"), stored_weights(model)
    check_memory(sum(tensor.nbytes for tensor in weights.values()), "a copy of the weights")
    folder = TemporaryDirectory(prefix="lazyllm-")
    memory = os.memfd_create("lazyllm")
    try:
        path = Path(folder.name)
        for part in (model.config, getattr(model, "generation_config", None), tokenizer):
            if part is not None:
                part.save_pretrained(path)
        (path / SINGLE_FILE).symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
        with open(memory, "wb", closefd=False) as file:
            entries = {
                name: (DTYPES[str(tensor.dtype)], tuple(tensor.shape), tensor.nbytes)
                for name, tensor in weights.items()
            }
            file.write(header_bytes(entries, {}))
            for tensor in weights.values():
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        checkpoint = Checkpoint(path)
    except BaseException:
        os.close(memory)
        folder.cleanup()
        raise
    weakref.finalize(checkpoint, os.close, memory)
    weakref.finalize(checkpoint, folder.cleanup)
    name = Path(model.config.name_or_path).name
    checkpoint.config = replace(checkpoint.config, name=name or checkpoint.config.architecture)
    return checkpoint


def stored_weights(model: Any) -> dict[str, Any]:
    """The model's tensors under the names that its files have."""
    loading = package("transformers.core_model_loading", "from_transformers")
    weights: dict[str, Any] = loading.revert_weight_conversion(model, model.state_dict())
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        weights = {name: tensor for name, tensor in weights.items() if not name.endswith("lm_head.weight")}
    for name, tensor in weights.items():
        if str(tensor.dtype) not in DTYPES:
            raise CheckpointError(f"tensor {name}: {tensor.dtype}; expected one of {', '.join(DTYPES)}")
        if tensor.is_meta:
            raise CheckpointError(f"tensor {name} is not in memory; load the model without offloading to disk")
    return weights
