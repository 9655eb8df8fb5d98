"""LazyLLM: dynamic token pruning for Llama-family models and Gemma 3, on a C core."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lazyllm import longbench as longbench
    from lazyllm import reproduce as reproduce
    from lazyllm.calibration.calibrate import calibrate
    from lazyllm.checkpoints.demo_model import demo_model
    from lazyllm.errors import CheckpointError, DeviceError
    from lazyllm.generation import Generation
    from lazyllm.llm import LLM, load
    from lazyllm.machine.info import info
    from lazyllm.method import Method
    from lazyllm.methods import (
        CLAA,
        FastKV,
        GemFilter,
        Preset,
        PromptCompression,
        RandomDrop,
        StaticPruning,
        parse_method,
    )
    from lazyllm.policy import Policy
    from lazyllm.prefix_cache import PrefixCache
    from lazyllm.pruning import Drop, Mass, Pruning
    from lazyllm.sampling import SamplingParams
    from lazyllm.searching.results import Search
    from lazyllm.searching.search import search
    from lazyllm.session import Session
    from lazyllm.sweeps.sweep import Sweep, sweep
    from lazyllm.trace import Trace

__all__ = [
    "CLAA",
    "LLM",
    "CheckpointError",
    "DeviceError",
    "Drop",
    "FastKV",
    "GemFilter",
    "Generation",
    "Mass",
    "Method",
    "Policy",
    "PrefixCache",
    "Preset",
    "PromptCompression",
    "Pruning",
    "RandomDrop",
    "SamplingParams",
    "Search",
    "Session",
    "StaticPruning",
    "Sweep",
    "Trace",
    "calibrate",
    "demo_model",
    "info",
    "load",
    "parse_method",
    "search",
    "sweep",
]

_HOMES = {
    "CLAA": "methods",
    "CheckpointError": "errors",
    "DeviceError": "errors",
    "Drop": "pruning",
    "FastKV": "methods",
    "GemFilter": "methods",
    "Generation": "generation",
    "LLM": "llm",
    "Mass": "pruning",
    "Method": "method",
    "Policy": "policy",
    "PrefixCache": "prefix_cache",
    "Preset": "methods",
    "PromptCompression": "methods",
    "Pruning": "pruning",
    "RandomDrop": "methods",
    "SamplingParams": "sampling",
    "Search": "searching.results",
    "Session": "session",
    "StaticPruning": "methods",
    "Sweep": "sweeps.sweep",
    "Trace": "trace",
    "calibrate": "calibration.calibrate",
    "demo_model": "checkpoints.demo_model",
    "info": "machine.info",
    "load": "llm",
    "parse_method": "methods",
    "search": "searching.search",
    "sweep": "sweeps.sweep",
}

_MODULES = ("longbench", "reproduce")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"lazyllm.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'lazyllm' has no attribute {name!r}")
    value = getattr(import_module(f"lazyllm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
