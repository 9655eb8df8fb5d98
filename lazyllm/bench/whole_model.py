"""Suite `shapes` on a CUDA device: prefill, pruning and decoding of a whole model, as wide as real ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lazyllm.bench.decode import decode
from lazyllm.bench.model_shapes import LARGE, SMALL
from lazyllm.bench.options import Options
from lazyllm.bench.prefill import prefill
from lazyllm.bench.pruned import pruned
from lazyllm.bench.random_model import write_model
from lazyllm.bench.report import Table

SUITE = "shapes"
TOKENS, VOCAB, CONTEXT = 3376, 32000, 8192
NOTE = f"Random bf16 weights, a vocabulary of {VOCAB}, the LM head being the embedding."


def whole_model(options: Options) -> Iterator[Table]:
    shape, tokens = (SMALL, options.tokens[0]) if options.quick else (LARGE, TOKENS)
    with tempfile.TemporaryDirectory(prefix="lazyllm-bench-") as scratch:
        folder = Path(scratch) / f"{shape.name}-shaped"
        write_model(folder, shape, VOCAB, CONTEXT)
        within = replace(options, model=str(folder), tokens=(tokens,), context=tokens)
        for suite in (prefill, pruned, decode):
            for table in suite(within):
                yield replace(table, suite=SUITE, notes=(NOTE, *table.notes))
