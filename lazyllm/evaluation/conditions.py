"""The conditions of a run, under which its rows can be compared; and the environment, which affects times."""

import re
from collections.abc import Mapping
from typing import Any

import lazyllm
from lazyllm.evaluation.chats import AnyWrapper, chat_wrapper
from lazyllm.llm import LLM
from lazyllm.machine.device import cuda_facts
from lazyllm.machine.info import processor, version
from lazyllm.method import Method
from lazyllm.support.files import digest

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PACKAGES = ("numpy", "tokenizers", "rouge", "jieba", "rapidfuzz")
"""Packages, if installed, on which samples, tokens and scores depend."""


def conditions_of_model(llm: LLM, wrapper: AnyWrapper, progress: bool) -> dict[str, Any]:
    """The conditions of a model that comparable rows share. Of mappings, only common keys are compared."""
    core = llm.core
    stored = sorted({DTYPES.get(tensor.dtype, tensor.dtype) for tensor in llm.checkpoint.tensors})
    return {
        "lazyllm": lazyllm.__version__,
        "model sha256": llm.checkpoint.weights_digest(progress),
        "tokenizer sha256": digest(llm.checkpoint.tokenizer_files, progress=False),
        "dtype": [llm.weights] if llm.weights != "auto" else stored,
        "device": llm.device.partition(":")[0],
        # with the type of keys and values where it is not that of the other activations
        "kernels": core.isa if core.kv == core.activations else f"{core.isa}, K and V in {llm.kv}",
        "packages": {name: installed for name in PACKAGES if (installed := version(name))},
        "wrapper": chat_wrapper(llm.tokenizer, wrapper),
    }


def conditions_of_methods(llm: LLM, settings: Mapping[str, Method], progress: bool) -> dict[str, Any]:
    """The conditions of settings beside their own fields, such as a model that compresses."""
    tables = {label: method.conditions(llm, progress) for label, method in settings.items()}
    named = {f"{label}: {name}": value for label, table in tables.items() for name, value in table.items()}
    return {"behind settings": named}


def environment(llm: LLM, warm_ups: int) -> dict[str, Any]:
    """Conditions that affect times only; the times of rows with equal environments are comparable."""
    if llm.device == "cpu":
        place = {"device": "cpu", "threads": llm.threads}
    else:
        names = dict(re.findall(r"\bcuda:(\d+) (.+?), \d+ GiB", cuda_facts()))
        numbers = llm.device.removeprefix("cuda:").split(",")
        place = {"device": ", ".join(names.get(number, f"cuda:{number}") for number in numbers)}
    return {"machine": processor(), **place, "warm-up runs": warm_ups}
