"""LazyLLM: dynamic token pruning for Llama-family models and Gemma 3, on a C core."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lazyllm import longbench as longbench
    from lazyllm import reproduce as reproduce
    from lazyllm.calibration.calibrate import calibrate as calibrate
    from lazyllm.checkpoints.demo_model import demo_model as demo_model
    from lazyllm.errors import CheckpointError as CheckpointError
    from lazyllm.errors import DeviceError as DeviceError
    from lazyllm.generation import Generation as Generation
    from lazyllm.llm import LLM as LLM
    from lazyllm.llm import load as load
    from lazyllm.machine.info import info as info
    from lazyllm.method import Method as Method
    from lazyllm.methods import CLAA as CLAA
    from lazyllm.methods import FastKV as FastKV
    from lazyllm.methods import GemFilter as GemFilter
    from lazyllm.methods import Preset as Preset
    from lazyllm.methods import PromptCompression as PromptCompression
    from lazyllm.methods import RandomDrop as RandomDrop
    from lazyllm.methods import Speedup as Speedup
    from lazyllm.methods import StaticPruning as StaticPruning
    from lazyllm.methods import parse_method as parse_method
    from lazyllm.policy import Policy as Policy
    from lazyllm.prefix_cache import PrefixCache as PrefixCache
    from lazyllm.pruning import Pruning as Pruning
    from lazyllm.sampling import SamplingParams as SamplingParams
    from lazyllm.scoring import Scoring as Scoring
    from lazyllm.searching.results import Search as Search
    from lazyllm.searching.search import search as search
    from lazyllm.session import Session as Session
    from lazyllm.stages import Drop as Drop
    from lazyllm.stages import Mass as Mass
    from lazyllm.sweeps.sweep import Sweep as Sweep
    from lazyllm.sweeps.sweep import sweep as sweep
    from lazyllm.trace import Trace as Trace

_NAMES_OF = {
    "calibration.calibrate": "calibrate",
    "checkpoints.demo_model": "demo_model",
    "errors": "CheckpointError DeviceError",
    "generation": "Generation",
    "llm": "LLM load",
    "machine.info": "info",
    "method": "Method",
    "methods": "CLAA FastKV GemFilter Preset PromptCompression RandomDrop Speedup StaticPruning parse_method",
    "policy": "Policy",
    "prefix_cache": "PrefixCache",
    "pruning": "Pruning",
    "sampling": "SamplingParams",
    "scoring": "Scoring",
    "searching.results": "Search",
    "searching.search": "search",
    "session": "Session",
    "stages": "Drop Mass",
    "sweeps.sweep": "Sweep sweep",
    "trace": "Trace",
}
_HOMES = {name: module for module, names in _NAMES_OF.items() for name in names.split()}
__all__ = sorted(_HOMES)
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
