"""Methods that Pruning is compared with, on the same engine; and the parser that reads any method."""

from lazyllm.methods.claa import CLAA
from lazyllm.methods.fastkv import FastKV
from lazyllm.methods.gemfilter import GemFilter
from lazyllm.methods.parsing import PruningInput, as_method, parse_method
from lazyllm.methods.preset import Preset
from lazyllm.methods.prompt_compression import PromptCompression
from lazyllm.methods.random_drop import RandomDrop
from lazyllm.methods.static_pruning import StaticPruning

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
