"""Weights that are no finite numbers: an error that names the layer, never garbage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny

from lazyllm import CheckpointError

SHAPE = tiny.Shape(seed=31, n_layers=4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("layer", range(SHAPE.n_layers))
def test_a_damaged_layer_is_named(tmp_path: Path, layer: int, value: float) -> None:
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    weight = tiny.random_weights(SHAPE)[name].copy()
    weight[0] = value
    made = tiny.build(SHAPE, tmp_path, {name: weight})
    session = made.load().session(None)
    with pytest.raises(CheckpointError, match=f"layer {layer} gave a value that is no finite number"):
        session.forward(made.ids(20))
    with pytest.raises(RuntimeError, match="did not finish"):
        session.forward([1])
