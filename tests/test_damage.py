"""Weights that are no finite numbers: an error that names the layer, never garbage."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from lazyllm import CheckpointError, _core

SHAPE = tiny.Shape(seed=31, n_layers=4)
EXPERTS = replace(SHAPE, n_experts=4, experts_per_token=2, expert_ffn=16, expert_layers=(1,))
NORMS_BEHIND = replace(SHAPE, pre_norms=False, post_norms=True, qk_norm=True, wide_qk_norm=True)
MATRICES = [f"self_attn.{name}_proj" for name in "qkvo"]
MATRICES += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
OF_EXPERTS = ["mlp.gate", *(f"mlp.experts.2.{name}_proj" for name in ("gate", "up", "down"))]
BEHIND = ["self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm"]


def damaged(folder: Path, shape: tiny.Shape, name: str, where: Any, value: float) -> tiny.Tiny:
    """A model with this value at a place of one of its tensors."""
    array = tiny.random_weights(shape)[name].copy()
    array[where] = value
    return tiny.build(shape, folder, {name: array})


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        *((SHAPE, name) for name in (*MATRICES, "input_layernorm", "post_attention_layernorm")),
        *((NORMS_BEHIND, name) for name in (*MATRICES, *BEHIND)),
        *((EXPERTS, name) for name in OF_EXPERTS),
    ],
)
def test_each_damaged_tensor_of_a_layer_is_named_by_it(
    tmp_path: Path, shape: tiny.Shape, name: str, value: float
) -> None:
    """With a stage after the layer, and one after the next, which meets the damage before the pass ends. A
    router is found by the first token, whatever experts it chooses; an expert by the tokens that it computes."""
    made = damaged(tmp_path, shape, f"model.layers.1.{name}.weight", 2 if shape is EXPERTS else 0, value)
    model = made.load()
    no_other = r"((?!layer (?!1\b)).)*"
    words = rf"^{no_other}layer 1\b{no_other}(no finite number|score of the token .* is (-?nan|not a number))"
    for stages in ([], [(1, 0.5)], [(2, 0.5)], [(1, (0.8, 0.1, 0.9))], [(0, 0.9), (1, 0.8), (2, 0.5)]):
        session = model.session(tiny.pruning(stages))
        with pytest.raises(CheckpointError, match=words):
            session.forward(made.ids(20))
        assert session.length == 0


def test_a_token_reads_the_experts_that_it_chose_and_no_others(tmp_path: Path) -> None:
    noticed = 0
    for expert in range(EXPERTS.n_experts):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        try:
            damaged(tmp_path, EXPERTS, name, slice(None), np.nan).load().session(None).forward([5])
        except CheckpointError:
            noticed += 1
    assert noticed == EXPERTS.experts_per_token


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_damaged_token_is_found_where_it_is_read(tmp_path: Path, value: float) -> None:
    """In a prompt, even outside the last token's window, and in a decode step. Passes without it run."""
    shape = tiny.Shape(seed=32, n_layers=2, windows=(4,))
    made = damaged(tmp_path, shape, "model.embed_tokens.weight", (7, 3), value)
    model, others = made.load(), [token for token in made.ids(60) if token != 7]
    words = "layer 0 gave a value that is no finite number: its weights, or those before it, are damaged"
    with pytest.raises(CheckpointError, match=words):
        model.session(None).forward([7, *others])
    session = model.session(None)
    session.forward(others)
    session.forward([others[0]], generated=True)
    with pytest.raises(CheckpointError, match=words):
        session.forward([7], generated=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_damaged_head_is_named_by_its_first_row(tmp_path: Path, value: float) -> None:
    """Drawn greedily, by chance or not at all: the same words. A surprisal names its token."""
    made = damaged(tmp_path, SHAPE, "lm_head.weight", ([41, 7, 90], 0), value)
    words = "the logit of token 7 is no finite number: the final norm or the LM head is damaged"
    samplers = [_core.Sampler(temperature, 1.0, 0, 0) for temperature in (0.0, 1.0)]
    for sampler in (*samplers, None):
        session = made.load().session(None)
        run = partial(session.advance, sampler=sampler) if sampler else session.forward
        with pytest.raises(CheckpointError, match=words):
            run(made.ids(20))
        assert session.length == 0
    made = damaged(tmp_path, SHAPE, "lm_head.weight", 3, value)  # the logits of each token
    with pytest.raises(CheckpointError, match="surprisal of token 1 is no finite number"):
        made.load().session(None).surprisal(made.ids(9))


@pytest.mark.parametrize(("part", "layer"), [("keys", 2), ("values", 2), ("aux", 1)])
def test_damaged_activations_are_named_by_the_layer_that_reads_them(tmp_path: Path, part: str, layer: int) -> None:
    """Planted in the state of a session. A token that waits for layer 2 waits with the input of layer 1."""
    made = tiny.build(SHAPE, tmp_path)
    rules = tiny.pruning([(1, 0.5)], memory=0.9, decode=[(0, 1.0), (1, 0.9)])
    session, other = made.load().session(rules), made.load().session(rules)
    session.forward(made.ids(20))
    session.forward([5], generated=True)
    other.set_tokens(session.ids, session.kinds, session.depths, session.gone)
    for place, name in product(range(SHAPE.n_layers), ("keys", "values", "aux", "remembered")):
        if (array := session.state(name, place)) is not None:
            if (name, place) == (part, 2):
                array[:] = np.nan
            other.set_state(name, place, array)
    with pytest.raises(CheckpointError, match=f"layer {layer} gave a value that is no finite number"):
        other.forward([6], generated=True)
    assert other.length == 21
