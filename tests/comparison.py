"""Compares the engine with the reference: which values must be equal, and which close."""

from typing import Any

import numpy as np
from reference import Reference
from tiny import Tiny
from tolerances import LOGITS, NEAR_TIE, SCORES, error


def per_layer(trace: list[dict[str, Any]], n_layers: int) -> list[tuple[list[int], list[int]]]:
    """The sets (in play, computed) of every layer. The trace's runs of layers must cover all layers."""
    sets: list[tuple[list[int], list[int]]] = []
    for run in trace:
        assert run["first_layer"] == len(sets)
        for _ in range(run["first_layer"], run["last_layer"] + 1):
            sets.append((list(run["in_play"]), list(run["computed"])))
    assert len(sets) == n_layers
    return sets


def compare_pass(session: Any, reference: Reference, got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    """After the same pass on both: the bookkeeping is equal, scores and logits are close."""
    assert session.length == len(reference.depths)
    assert session.n_prompt == reference.n_prompt
    assert session.kinds.tolist() == reference.kinds
    assert session.last_pass.tolist() == reference.last_pass.tolist()
    assert session.depths.tolist() == reference.depths
    assert np.flatnonzero(session.gone).tolist() == sorted(reference.gone)
    n_layers = reference.n_layers
    assert per_layer(session.last_trace, n_layers) == per_layer(reference.last_trace, n_layers)
    wanted = {run["last_layer"]: run["scores"] for run in reference.last_trace if run["scores"] is not None}
    traced = {run["last_layer"]: run["scores"] for run in session.last_trace if run["scores"] is not None}
    passes = reference.last_pass
    dropping = {layer for layer in wanted if layer < n_layers - 1 and passes[layer][0] > passes[layer + 1][0]}
    assert dropping <= set(traced) <= set(wanted)
    for layer, scores in traced.items():
        assert scores.dtype == np.float32
        assert error(scores, wanted[layer]) <= SCORES[dtype]
    assert got.dtype == np.float32
    assert error(got, want) <= LOGITS[dtype]


def state_after(session: Any, logits: np.ndarray, n_layers: int) -> dict[str, Any]:
    """All that can be observed after a pass, to the bit."""
    state = {name: getattr(session, name).tolist() for name in ("depths", "kinds", "last_pass")}
    scores = [run["scores"] for run in session.last_trace]
    state["scores"] = [None if values is None else values.tobytes() for values in scores]
    return state | {"sets": per_layer(session.last_trace, n_layers), "logits": logits.tobytes()}


def converse(session: Any, tiny: Tiny, passes: list[tuple[int, bool]]) -> list[dict[str, Any]]:
    """Runs the passes (number of tokens, generated) on the session; returns its state after each of them."""
    session.trace = True
    return [
        state_after(session, session.forward(tiny.ids(count, number), generated), tiny.shape.n_layers)
        for number, (count, generated) in enumerate(passes)
    ]


def drive(
    tiny: Tiny,
    rules: dict[str, Any],
    passes: list[tuple[int, bool]],
    seed: int = 0,
    threads: int = 1,
    policy: Any = None,
) -> Reference:
    """Runs the same passes (number of tokens, generated) on both and compares after each, until a near-tie.

    At a near-tie both selections are right and the runs may differ from then on, so the comparison stops;
    the caller checks `margin` of the returned reference.
    """
    session = tiny.load(threads).session(rules)
    session.trace = True
    reference = Reference(tiny.config, tiny.weights, rules, policy)
    for number, (count, generated) in enumerate(passes):
        ids = tiny.ids(count, seed + number)
        want = reference.forward(ids, generated)
        if reference.margin <= NEAR_TIE:
            break
        got = session.forward(ids, generated=generated)
        compare_pass(session, reference, got, want, tiny.shape.dtype)
    return reference
