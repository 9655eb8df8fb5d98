"""The rules of rival methods in plain NumPy, as policies of `Reference`; written from docs/method.md alone."""

import math

import numpy as np
from reference import ReferenceView


def mean_with_zeros(row: np.ndarray, width: int) -> np.ndarray:
    """The mean of the `width` values around each; values beyond the ends count as 0."""
    half = width // 2
    return np.array([sum(row[max(0, k - half) : k + half + 1]) / width for k in range(len(row))])


class FastKVRule:
    """Attention of the last 8 tokens, over heads and rows, then over the 7 neighbours that exist."""

    layers = 1

    def score(self, view: ReferenceView) -> np.ndarray:
        raw = view.attention(8).mean(axis=(0, 1))
        return np.array([raw[max(0, k - 3) : k + 4].mean() for k in range(len(raw))])


class CLAARule:
    """The largest z-score over four layers and all key-value heads; see docs/method.md."""

    layers = 4

    def observe(self, view: ReferenceView) -> list[np.ndarray]:
        """z-scores of the tokens that can be dropped, by key-value head."""
        attention, n_kv_heads = view.attention(8), len(view.keys())
        group = len(attention) // n_kv_heads
        told = []
        for g in range(n_kv_heads):
            row = attention[g * group : (g + 1) * group].mean(axis=0).mean(axis=0)
            row = mean_with_zeros(row[~view.protected], 7)
            told.append((row - row.mean()) / (row.std() or 1.0))
        return told

    def score(self, view: ReferenceView) -> np.ndarray:
        layers = [*view.observed.values(), self.observe(view)]
        scores = np.zeros(len(view.positions))
        scores[~view.protected] = np.max([row for heads in layers for row in heads], axis=0)
        return scores


class GemFilterRule:
    """Chooses the tokens of GemFilter's second pass; `margin` is the gap to the first one left out."""

    layers = 1

    def score(self, view: ReferenceView) -> np.ndarray:
        queries, keys = view.queries(1)[:, 0], view.keys()
        group = len(queries) // len(keys)
        raw = np.sum([keys[head // group] @ query for head, query in enumerate(queries)], axis=0)
        scores = mean_with_zeros(raw, 5)
        best = sorted(range(len(scores)), key=lambda k: (-scores[k], k))
        self.chosen = sorted(best[: view.n_keep])
        gap = scores[best[view.n_keep - 1]] - scores[best[view.n_keep]]
        self.margin = float(gap / np.abs(scores).max())
        return scores


class ExpectedAttentionRule:
    """Attention that the next 512 positions are expected to pay, by their queries' mean and covariance, times
    the length of values; shares of each key-value head, the mean over heads and layers."""

    layers = 1 << 16

    def observe(self, view: ReferenceView) -> np.ndarray:
        session, free = view._session, np.flatnonzero(~view.protected)
        n, config = len(session.depths), session.config

        def rotation(position: int) -> np.ndarray:
            return session.rope(np.eye(config["head_dim"]), position, view.layer)

        ahead = np.mean([rotation(n + step) for step in range(512)], axis=0)
        keys, values = view.keys(), view.values()
        group = config["n_heads"] // config["n_kv_heads"]
        told = np.zeros((len(keys), len(view.positions)))
        for head in range(config["n_heads"]):
            expected = np.array(
                [session.queries[i][head] @ np.linalg.inv(rotation(i)) @ ahead for i in view._new if i >= 4]
            )
            mean, covariance = expected.mean(axis=0), np.atleast_2d(np.cov(expected.T, bias=True))
            exponents = np.array(
                [
                    mean @ key / math.sqrt(config["query_scalar"])
                    + key @ covariance @ key / (2 * config["query_scalar"])
                    for key in keys[head // group][free]
                ]
            )
            told[head // group, free] += np.exp(exponents - np.logaddexp.reduce(exponents)) / group
        told *= np.linalg.norm(values, axis=-1)
        return np.asarray((told / told.sum(axis=1, keepdims=True)).mean(axis=0))

    def score(self, view: ReferenceView) -> np.ndarray:
        return np.asarray(np.mean([*view.observed.values(), self.observe(view)], axis=0))
