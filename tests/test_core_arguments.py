"""The core checks each argument by itself, whatever the Python layers above have checked before."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
from tiny import pruning

from lazyllm import CheckpointError, _core


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    return tiny.build(tiny.Shape(n_layers=4), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(checkpoint: tiny.Tiny) -> _core.Model:
    return checkpoint.load()


@pytest.fixture
def session(model: _core.Model) -> _core.Session:
    return model.session(None)


@contextmanager
def refused(words: str) -> Iterator[None]:
    with pytest.raises((CheckpointError, TypeError, ValueError, RuntimeError), match=re.escape(words)):
        yield


def test_types_cannot_be_changed_nor_sessions_made(model: _core.Model) -> None:
    for kind in (_core.Model, _core.Session, _core.Sampler):
        with refused("immutable type"):
            kind.length = 1  # type: ignore[attr-defined]
    with refused("cannot create"):
        _core.Session()


def test_kinds_of_numbers(checkpoint: tiny.Tiny) -> None:
    with refused('kv is "q8"; it must be f32, f16 or bf16'):
        checkpoint.load(kv="q8")
    with refused('compute is "int3"; it must be f32, bf16 or int8'):
        checkpoint.load(compute="int3")


def test_a_config(checkpoint: tiny.Tiny) -> None:
    frequencies = np.full(4, np.inf, np.float32)
    ropes = {"rope_scale": [1.0] * 5, "inv_freq": np.ones(5 * 4, np.float32)}
    for fields, words in (
        ({"n_layers": 2.0}, "config: n_layers is 2.0, which is of another type"),
        ({"hidden": 1 << 40}, "hidden is 1099511627776, which is of another type or too large"),
        ({"norm_eps": "a"}, "norm_eps is 'a', which is of another type"),
        ({"tied": 1}, "tied is 1, which is of another type"),
        ({"ffn": 0}, "ffn is 0; it must be 1 to 1048576"),
        ({"n_kv_heads": 3}, "is no multiple of n_kv_heads"),
        ({"n_heads": 1 << 18}, "is more than 65536"),
        ({"norm_eps": 1.5}, "norm_eps is 1.5; it must be 0 to 1"),
        ({"rope_scale": [0.0]}, "rope_scale[0] is 0; it must be above 0"),
        ({"rope_scale": []}, "inv_freq has 4 values; it must have 0"),
        ({"layer_rope": [0, 0, 1, 0]}, "layer 2 has rope 1 of 0 to 0"),
        ({"layer_rope": [0]}, "layer_rope has 1 values; it must have 4"),
        ({"short_context": 20}, "layer 0 has rope 0 of 0 to -1"),
        ({"rotary_dim": 3}, "rotary_dim is odd"),
        ({"rotary_dim": 10}, "rotary_dim is 10; it must be 1 to 8"),
        ({"query_growth": float("nan")}, "query_growth is nan; it must be 0 to"),
        ({"pre_norms": False}, "neither pre_norms nor post_norms"),
        ({"query_step": 0}, "query_step is 0; it must be 1 to"),
        ({"logit_scale": 0.0}, "logit_scale is 0; it must be 1.1754"),
        ({"query_scalar": -1.0}, "query_scalar is -1; it must be 0 to"),
        ({"attention_cap": -1.0}, "attention_cap is -1; it must be 0 to"),
        ({"logit_cap": float("nan")}, "logit_cap is nan; it must be 0 to"),
        ({"embedding_scale": float("inf")}, "embedding_scale is inf; it must be 1.1754"),
        ({"windows": [0, 0, 0, -1]}, "layer 3 has rope 0 of 0 to 0, window -1"),
        ({"windows": [0]}, "windows has 1 values"),
        ({"expert_layers": [0]}, "expert_layers has 1 values"),
        ({"expert_layers": [0, 0, 2, 0]}, "layer 2 has rope 0 of 0 to 0, window 0 and 2 of its FFNs"),
        ({"expert_layers": [0, 1, 0, 0]}, "window 0 and 1 of its FFNs from 0 experts"),
        ({"n_experts": 1025}, "n_experts is 1025; it must be 0 to 1024"),
        ({"experts_per_token": 1}, "experts_per_token is 1; it must be 0 to 0"),
        ({"expert_ffn": -1}, "expert_ffn is -1; it must be 0 to 1048576"),
        ({"normed_experts": 0}, "normed_experts is 0, which is of another type"),
        ({"inv_freq": frequencies}, "config: inv_freq[0] is inf"),
        (ropes, "n_ropes is 5; it must be 1 to 4"),
        ({"late_qk_norm": True, "query_growth": 0.5}, "query_growth and late_qk_norm"),
        ({"layer_norm": True, "wide_qk_norm": True}, "layer_norm goes with"),
        ({"layer_norm": True, "post_norms": True}, "layer_norm goes with"),
        ({"parallel": True, "pre_norms": False}, "parallel goes with"),
        ({"parallel": True, "post_norms": True}, "parallel goes with"),
    ):
        assert fields.keys() <= checkpoint.config.keys()
        with refused(words):
            replace(checkpoint, config=checkpoint.config | fields).load()


def changed(entry: Any, **values: Any) -> Any:
    names = ("name", "dtype", "shape", "shard", "offset", "bytes")
    return tuple({**dict(zip(names, entry, strict=True)), **values}.values())


def test_a_table_of_tensors(checkpoint: tiny.Tiny) -> None:
    first, *others = checkpoint.tensors
    assert first.name == "model.embed_tokens.weight"
    name, n_bytes, size = first.name, first.n_bytes, checkpoint.path.stat().st_size
    beyond = (size - n_bytes + 4, 2**63, 2**64 - 4)  # by one value, far, and with an end that wraps around
    for tensors, words in (
        ([changed(first, shape=(1, 2, 3, 4, 5, 6, 7, 8, 9)), *others], "has more than"),
        ([changed(first, bytes=1), *others], "1 bytes, but its shape and dtype make"),
        ([changed(first, shard=1), *others], "shard 1 of 1"),
        *(
            (
                [changed(first, offset=place), *others],
                f"{name}: bytes {place} to {(place + n_bytes) % 2**64} lie past the end of a file of {size} b",
            )
            for place in beyond
        ),
        ([changed(first, dtype="Q4_K"), *others], "Q4_K stores whole blocks of 256"),
        ([first, *others, first], f"{name}: stands in the checkpoint twice"),
        ([list(first)], "an entry is (name, dtype, shape, shard, offset, bytes)"),
    ):
        with refused(words):
            replace(checkpoint, tensors=tensors).load()
    replace(checkpoint, tensors=[changed(first, offset=size - n_bytes), *others]).load()  # ends with its file


BY_MASS = (0, (0.9, 0.1, 0.5))
MEAN = "a mean over layers takes one stage, none for decode"
FINAL = "a policy's scores are final"


def mean(*stages: tuple[Any, ...], **options: Any) -> dict[str, Any]:
    return pruning(stages, **{"decode": [], "average": True, **options})


def test_a_pruning(model: _core.Model) -> None:
    for setting, words in (
        (7, "pruning is 7; it must be a dict or None"),
        ({}, "pruning: stages is missing"),
        (pruning([[1, 0.5]]), "stage [1, 0.5]; it must be (layer, rule)"),
        (pruning([(1,)]), "a stage is (layer, rule) or (layer, rule, for_good)"),
        (pruning([(1, "a")]), "must be real number"),
        (pruning([(3, 0.5)]), "stage after layer 3; in a model of 4 layers it can prune after layers 0 to 2"),
        (pruning([(4, 0.5, True)]), "it can prune after layers 0 to 3"),
        (pruning([(-1, 0.5)]), "stage after layer -1"),
        (pruning([(1, 0.5), (1, 0.4)]), "in a model of 4 layers it can prune after layers 2 to 2"),
        (pruning([(1, 0.5), (2, 0.6)]), "keep 0.6 after layer 2; it must be above 0 and at most 0.5"),
        (pruning([(1, 0.0)]), "keep 0 after layer 1; it must be above 0 and at most 1"),
        (pruning([(1, 1.5)]), "keep 1.5 after layer 1; it must be above 0 and at most 1"),
        (pruning([(1, float("nan"))]), "keep nan after layer 1"),
        (pruning([(0, (0.0, 0.1, 0.5))]), "mass 0, keep_min 0.1 and keep_max 0.5 after layer 0"),
        (pruning([(0, (0.5, 0.6, 0.5))]), "keep_min 0.6 and keep_max 0.5 after layer 0"),
        (pruning([(0, (0.5, 0.1))]), "a mass rule is (mass, keep_min, keep_max)"),
        (pruning([(1, 0.5)], decode="later"), "decode is 'later'"),
        (pruning([(1, 0.5)], decode=[(3, 0.5)]), "decode: stage after layer 3"),
        (pruning([(1, 0.5)], protect=[[0, 1]]), "span [0, 1]; it must be (begin, end)"),
        (pruning([(1, 0.5)], protect=[(0,)]), "a span is (begin, end)"),
        (pruning([(1, 0.5)], protect=[(2, 2)]), "span (2, 2); 0 <= begin < end must hold"),
        (pruning([(1, 0.5)], protect=[(-1, 2)]), "span (-1, 2)"),
        (pruning([(1, 0.5)], pooling="sum"), "pooling is 'sum'"),
        (pruning([(1, 0.5)], head=[1, 1]), "head is [1, 1]; it must be (layer, head) or None"),
        (pruning([(1, 0.5)], head=(1,)), "head is (layer, head)"),
        *((pruning([(1, 0.5)], head=head), "layers of 4 heads") for head in ((4, 0), (0, 4), (0, -1))),
        (pruning([(1, 0.5)], head=(1, 0), queries=513), "queries is 513; with a head it must be at most 512"),
        (pruning([(1, 0.5)], head=(-1, 0)), "head is (-1, 0); it must be (layer, head) or None"),
        (pruning([(1, 0.5)], policy=7), "policy is 7; it must be callable or None"),
        (pruning([(1, 0.5)], sink=-1), "sink is -1; it must be 0 or more"),
        (pruning([(1, 0.5)], window=-1), "window is -1; it must be 0 or more"),
        (pruning([(1, 0.5)], queries=0), "queries is 0; it must be 1 or more"),
        (pruning([(1, 0.5)], smooth=4), "smooth is 4; it must be odd and 1 or more"),
        (pruning([(1, 0.5)], smooth=-1), "smooth is -1; it must be odd and 1 or more"),
        (pruning([(1, 0.5)], layers=0), "layers is 0; it must be 1 or more"),
        (pruning([(1, 0.5)], memory=1.5), "memory is 1.5; it must be from 0 to 1"),
        (pruning([(1, 0.5)], memory=0.5, revival=1.5), "revival is 1.5; it must be from 0 to 1, and 1 without memory"),
        (pruning([(1, 0.5)], revival=0.5), "revival is 0.5; it must be from 0 to 1, and 1 without memory"),
        (pruning([(1, 0.5)], memory=0.5, gain=0.5), "gain is 0.5; it must be from 1 to 1000, and 1 without memory"),
        (pruning([(1, 0.5)], gain=2.0), "gain is 2; it must be from 1 to 1000, and 1 without memory"),
        (pruning([(1, 0.5)], min_tokens=-1), "min_tokens is -1; it must be 0 or more"),
        (pruning([(1, 0.5)], average=True), MEAN),
        (mean(), MEAN),
        (mean((0, 0.5), (1, 0.4)), MEAN),
        (mean((1, 0.5, True), layers=2), MEAN),
        (mean((1, 0.5, True), memory=0.5), MEAN),
        *((mean((1, 0.5, True), decode=decode), MEAN) for decode in ("same", "frozen", [(1, 0.5)])),
        (pruning([BY_MASS], policy=print), FINAL),
        (pruning([(1, 0.5)], decode=[BY_MASS], policy=print), FINAL),
        (pruning([(1, 0.5)], policy=print, queries=2), FINAL),
        (pruning([(1, 0.5)], policy=print, smooth=3), FINAL),
        (pruning([(1, 0.5)], policy=print, head=(1, 0)), FINAL),
        (pruning([(1, 0.5)], policy=print, memory=0.5), FINAL),
        (mean((1, 0.5), policy=print), FINAL),
    ):
        with refused(words):
            model.session(setting)


def test_ids(session: _core.Session) -> None:
    for ids, words in (
        ("text", "not str; encode text with the tokenizer"),
        (b"text", "not bytes; encode text with the tokenizer"),
        ([], "no tokens were given"),
        ([[1, 2], [3, 4]], "ids has 2 dimensions; it must have 1"),
        ([0.5], "ids are of type float64; they must be integers"),
        ([1, 2.0], "ids are of type float64; they must be integers"),
        ([True], "ids are of type bool; they must be integers"),
        ([None], "ids are of type object; they must be integers"),
        (np.array([1], np.float32), "ids are of type float32; they must be integers"),
        ([2**70], "ids are of type object; they must be integers"),
        *((ids, "ids go from 0 to 96") for ids in ([2**63], [2**32], [-1], np.array([2**64 - 1], np.uint64))),
    ):
        with refused(words):
            session.forward(ids)
        assert session.length == 0


def test_what_a_session_is_asked_for(checkpoint: tiny.Tiny, session: _core.Session) -> None:
    context, vocab = checkpoint.config["context"], checkpoint.config["vocab"]

    def refuses(*calls: tuple[Callable[[], object], str]) -> None:
        for call, words in calls:
            with refused(words):
                call()

    refuses(
        (lambda: session.reserve(context + 1), f"{context + 1} tokens are more than the model's context of"),
        (lambda: session.logits, "there are no logits: the context is empty"),
        (lambda: session.truncate(1), "a context of 0 tokens cannot be truncated to 1; it must be 0 to 0"),
        (lambda: session.truncate(-1), "cannot be truncated to -1"),
        (lambda: setattr(session, "trace", 1), "trace must be True or False"),
        (lambda: session.set_tokens(bytes(4), bytes(1), bytes(8), bytes(1)), "all of the same length"),
    )
    session.forward([1, 2, 3])
    refuses(
        (lambda: session.set_state("keys", 0, bytes(3)), "3 bytes of keys; each token has "),
        (lambda: session.set_state("logits", 0, bytes(4)), f"1 logits; the model has a vocabulary of {vocab}"),
    )


def test_a_sampler() -> None:
    for values, words in (
        ((-1.0, 1.0, 0, 0), "temperature is -1; it must be 0 or more"),
        ((float("nan"), 1.0, 0, 0), "temperature is nan"),
        ((1.0, 0.0, 0, 0), "top_p is 0"),
        ((1.0, 1.5, 0, 0), "top_p is 1.5"),
        ((1.0, 1.0, -1, 0), "top_k is -1"),
    ):
        with refused(words):
            _core.Sampler(*values)
    with refused("logits has 2 dimensions; it must have 1"):
        _core.Sampler(1.0, 1.0, 0, 0).sample(np.zeros((2, 3), np.float32))
