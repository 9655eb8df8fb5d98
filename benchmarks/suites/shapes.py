"""Suite `shapes`: random weights in the shapes of 1B and 7B models: layers on the CPU, whole on a GPU."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.measuring.models import LARGE, MEDIUM, SMALL, ModelShape, write_model
from benchmarks.measuring.report import Section
from benchmarks.options import Options
from benchmarks.suites.decode import decode
from benchmarks.suites.formats import Subject, of_subject
from benchmarks.suites.prefill import prefill
from benchmarks.suites.pruned import pruned

LAYERS, QUICK_LAYERS = {MEDIUM: 4, LARGE: 2}, {SMALL: 2}  # of the larger of the two models that are compared
VOCAB, CONTEXT = 1024, 2048
WHOLE_TOKENS, WHOLE_VOCAB, WHOLE_CONTEXT = 3376, 32000, 8192
PREFIX = "lazyllm-bench-"


def shapes(options: Options) -> Iterator[Section]:
    with tempfile.TemporaryDirectory(prefix=PREFIX) as scratch:
        if not options.widest.on_cpu:
            yield from whole_model(options, Path(scratch))
            return
        for shape, layers in (QUICK_LAYERS if options.quick else LAYERS).items():
            yield from of_subject(options, layer_of(shape, layers, Path(scratch)))


def layer_of(shape: ModelShape, layers: int, scratch: Path) -> Subject:
    folders = {count: scratch / f"{shape.name}-{count}" for count in (layers, 1)}
    for count, folder in folders.items():
        write_model(folder, replace(shape, n_layers=count), VOCAB, CONTEXT)
    return Subject(f"a layer of {shape.name} shape", scratch, tuple(folders.values()), layers)


def whole_model(options: Options, scratch: Path) -> Iterator[Section]:
    """Prefill, pruning and decoding of a whole model, on a GPU."""
    shape, tokens = (SMALL, options.tokens[0]) if options.quick else (LARGE, WHOLE_TOKENS)
    note = f"Random bf16 weights, a vocabulary of {WHOLE_VOCAB}, the LM head tied to the embedding."
    folder = scratch / f"{shape.name}-shaped"
    write_model(folder, shape, WHOLE_VOCAB, WHOLE_CONTEXT)
    whole = replace(options, model=str(folder), tokens=(tokens,), context=tokens)
    for suite in (prefill, pruned, decode):
        for section in suite(whole):
            yield replace(section, notes=(note, *section.notes))
