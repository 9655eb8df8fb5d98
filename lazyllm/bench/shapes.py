"""Suite `shapes`: dense prefill of models of random weights, a few layers of the sizes that people run."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lazyllm.bench import goals
from lazyllm.bench.ceilings import Ceilings
from lazyllm.bench.model_shapes import LARGE, MEDIUM, SMALL, ModelShape
from lazyllm.bench.options import Options
from lazyllm.bench.peers import TRANSFORMERS, transformers_peer
from lazyllm.bench.report import Figure, Row, Table, on_threads
from lazyllm.bench.rounds import Times, in_turn
from lazyllm.bench.scaling import prefill_of
from lazyllm.llm import load
from lazyllm.pruning import Pruning

SUITE = "shapes"
OURS, RATIO = "lazyllm", "time / ours"
FEW, ONE = "few layers", "one layer"
LAYERS, QUICK_LAYERS = {MEDIUM: 3, LARGE: 2}, {SMALL: 2}  # beside one: what they differ by is whole layers
TOKENS, VOCAB, CONTEXT = (512, 1024), 1024, 2048
PEERS = {"transformers f32": "float32", "transformers bf16": "bfloat16"}
GOALS = {"transformers f32": goals.SHAPES_F32, "transformers bf16": goals.SHAPES_BF16}
DEVIATION = 0.02
BLOCK_VALUES = 1 << 20


def shapes(options: Options) -> Iterator[Table]:
    for shape, few in (QUICK_LAYERS if options.quick else LAYERS).items():
        with tempfile.TemporaryDirectory(prefix="lazyllm-bench-") as scratch:
            folders = {FEW: Path(scratch) / FEW, ONE: Path(scratch) / ONE}
            for folder, layers in zip(folders.values(), (few, 1), strict=True):
                write_model(folder, replace(shape, n_layers=layers))
            for threads in options.threads:
                yield measured(options, folders, shape, few, threads)


def measured(options: Options, folders: dict[str, Path], shape: ModelShape, few: int, threads: int) -> Table:
    ceilings = Ceilings(threads)
    llms = {size: load(folder, device="cpu", threads=threads) for size, folder in folders.items()}
    rows: list[Row] = []
    with ExitStack() as stack:
        peers = {
            (name, size): stack.enter_context(transformers_peer(folder, dtype, threads))
            for name, dtype in PEERS.items()
            for size, folder in folders.items()
            if TRANSFORMERS in options.peers
        }
        for n in TOKENS[:1] if options.quick else TOKENS:
            ids = np.random.default_rng(n).integers(0, VOCAB, n).tolist()
            contestants = {
                **ceilings.compute,
                **{named(OURS, size): prefill_of(llm, ids) for size, llm in llms.items()},
                **{named(*key): peer.seconds("prefill", ids) for key, peer in peers.items()},
            }
            times = in_turn(contestants, options.rounds, f"{shape.name}-shaped, {n} tokens")
            work = Pruning().flops(llms[FEW].config, n) - Pruning().flops(llms[ONE].config, n)
            engines = dict.fromkeys([OURS, *(name for name, _ in peers)])
            least = work / (few - 1) / ceilings.flops(times)
            rows += [
                row(shape, times, engine, few, least, {"tokens": n, "threads": threads}) for engine in engines
            ]
    note = (
        f"Random bf16 weights. Time of a layer: what {few} layers take beyond one, since of the last layer's "
        f"output only one row is computed here. Whole model: reckoned from it for {shape.n_layers} layers, "
        f"with a vocabulary of {VOCAB}."
    )
    return Table(SUITE, f"Dense prefill, {shape.name}-shaped, {on_threads(threads)}", rows, (note,))


def named(engine: str, size: str) -> str:
    return f"{engine}, {size}"


def row(
    shape: ModelShape,
    times: dict[str, Times],
    engine: str,
    few: int,
    least: float,
    keys: dict[str, str | int],
) -> Row:
    """`least` are the seconds of a layer at the ceiling."""
    mine, ours = (layer_times(times, name, few) for name in (engine, OURS))
    whole = times[named(engine, ONE)].median + (shape.n_layers - 1) * mine.median
    figures: dict[str, Figure] = {
        "time of a layer": mine,
        "of ceiling": least / mine.median,
        "whole model, s": whole,
    }
    if engine != OURS:
        figures[RATIO] = mine.median / ours.median
    wanted = {RATIO: GOALS[engine]} if shape is LARGE and engine in GOALS else {}
    return Row(f"{engine}, {keys['tokens']} tokens", figures, wanted, {"engine": engine, **keys})


def layer_times(times: dict[str, Times], engine: str, few: int) -> Times:
    pairs = zip(times[named(engine, FEW)].seconds, times[named(engine, ONE)].seconds, strict=True)
    return Times(tuple((several - one) / (few - 1) for several, one in pairs))


# ---- the model -----------------------------------------------------------------------------------


def write_model(folder: Path, shape: ModelShape) -> None:
    """A Llama of that shape in Hugging Face layout, without a tokenizer."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model.safetensors", tensor_shapes(shape))


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    width, kv_width = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, shape.hidden)}
    for layer in range(shape.n_layers):
        parts = {
            "input_layernorm": (shape.hidden,),
            "self_attn.q_proj": (width, shape.hidden),
            "self_attn.k_proj": (kv_width, shape.hidden),
            "self_attn.v_proj": (kv_width, shape.hidden),
            "self_attn.o_proj": (shape.hidden, width),
            "post_attention_layernorm": (shape.hidden,),
            "mlp.gate_proj": (shape.ffn, shape.hidden),
            "mlp.up_proj": (shape.ffn, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.ffn),
        }
        made |= {f"model.layers.{layer}.{name}.weight": size for name, size in parts.items()}
    return made | {"model.norm.weight": (shape.hidden,)}


def write_weights(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """Random bfloat16 values, a block of them over and over; ones for norms."""
    random = np.random.default_rng(0).normal(0, DEVIATION, BLOCK_VALUES).astype(np.float32)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            values = random if len(shape) > 1 else np.ones(1, np.float32)
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            file.write(np.resize(bits, math.prod(shape)).tobytes())
