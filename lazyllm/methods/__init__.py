"""Methods that Pruning is compared with, on the same engine; and the parser that reads any method."""

from lazyllm.methods.baselines import RandomDrop, StaticPruning
from lazyllm.methods.compression import PromptCompression
from lazyllm.methods.one_stage import CLAA, FastKV, GemFilter
from lazyllm.methods.parsing import PruningInput, as_method, parse_method
from lazyllm.methods.preset import Preset

__all__ = [
    "CLAA",
    "FastKV",
    "GemFilter",
    "Preset",
    "PromptCompression",
    "PruningInput",
    "RandomDrop",
    "StaticPruning",
    "as_method",
    "parse_method",
]
