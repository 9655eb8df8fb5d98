"""Methods that Pruning is compared with, on the same engine; and the parser that reads any method."""

from lazyllm.methods.compression import PromptCompression
from lazyllm.methods.parsing import PruningInput, as_method, parse_method
from lazyllm.methods.preset import Preset
from lazyllm.methods.rivals import CLAA, FastKV, GemFilter, RandomDrop, StaticPruning
from lazyllm.methods.speedup import Speedup

__all__ = [
    "CLAA",
    "FastKV",
    "GemFilter",
    "Preset",
    "PromptCompression",
    "PruningInput",
    "RandomDrop",
    "Speedup",
    "StaticPruning",
    "as_method",
    "parse_method",
]
