"""Token use: how much of the prompt each layer has computed, by new token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lazyllm.generation import Generation
from lazyllm.method import Method

Rows = Sequence[Mapping[str, Any]]


def by_layer(counts: np.ndarray) -> dict[str, Any]:
    """Counts of layers, without those of a layer that are equal to the layer's below, as plain data."""
    return {
        str(layer): own.tolist()
        for layer, own in enumerate(counts)
        if layer == 0 or (own != counts[layer - 1]).any()
    }


def used(method: Method, out: Generation, n_layers: int) -> dict[str, list[int]] | None:
    """By layer: how many prompt tokens it has computed by each new token. None if generated tokens are
    pruned: revived tokens may then be generated ones."""
    if (method.core() or {}).get("prune_generated"):
        return None
    computed = out.passes["computed"].reshape(-1, n_layers).copy()
    computed[1:] -= 1  # a decode step computes its own token in every layer
    return by_layer(computed.cumsum(axis=0).T)


def token_use(rows: Rows) -> dict[int, np.ndarray]:
    """By layer: the mean share of the prompt computed at each step. An ended answer keeps its last share."""
    layers = sorted({int(layer) for row in rows for layer in row["used"]})
    steps = max((row["new_tokens"] for row in rows), default=0)

    def shares(row: Mapping[str, Any], layer: int) -> np.ndarray:
        nearest = max(recorded for recorded in map(int, row["used"]) if recorded <= layer)
        series = np.asarray(row["used"][str(nearest)], float)
        return np.asarray(np.pad(series, (0, steps - len(series)), mode="edge") / row["prompt_tokens"])

    return {layer: np.mean([shares(row, layer) for row in rows], axis=0) for layer in layers}


def token_use_by_setting(rows: Rows) -> dict[str, dict[int, np.ndarray]]:
    """`token_use` of each setting that pruned a token of any prompt, where rows recorded it."""
    pruned = dict.fromkeys(row["setting"] for row in rows if row["used"] and len(row["used"]) > 1)
    return {setting: token_use([row for row in rows if row["setting"] == setting]) for setting in pruned}
