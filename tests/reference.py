"""LazyLLM token pruning in plain NumPy: slow, float64, one dictionary entry per token and layer.

Written only from docs/method.md. It shares no code and no memory layout with the engine, and asserts the
method's invariants (at most one Aux row per token, nothing computed twice) while it runs.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

REACH = 32  # neighbours on each side that a word brings
HEAD_WEIGHT = 8.0
LEVEL_ALONE, LEVEL_BLOCK = 4, 512  # places in play
Rule = float | tuple[float, float, float]
Stage = tuple[Rule, bool]  # the bool: what it drops is gone
PROMPT, GENERATED, READ = range(3)  # READ: of a prompt, with no pass since


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def levelled(row: np.ndarray) -> np.ndarray:
    """One head's attention, 0 to tokens that the row does not see, with each block's share that of its tokens."""
    seen, places = row != 0, np.arange(len(row))
    blocks = np.where(places < LEVEL_ALONE, -1 - places, places // LEVEL_BLOCK)
    level = np.zeros_like(row)
    for block in np.unique(blocks[seen]):
        of_block = seen & (blocks == block)
        level[of_block] = row[of_block] / row[of_block].sum() * of_block.sum() / seen.sum()
    return level


def capped(values: np.ndarray, cap: float) -> np.ndarray:
    return np.asarray(cap * np.tanh(values / cap)) if cap else values


def rounded(values: np.ndarray, kv: str) -> np.ndarray:
    """The nearest numbers of that type, ties to even; f32 stands for exact."""
    if kv == "f32":
        return values
    if kv == "f16":
        return values.astype(np.float16).astype(np.float64)
    fraction, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(fraction * 256), exponent - 8))


class ReferenceView:
    """The view of a layer that a policy gets; its arrays are in float64."""

    def __init__(self, session: Reference, layer: int, first: int, n_keep: int | None, state: dict[str, Any]) -> None:
        self.layer, self.n_keep = layer, n_keep
        self.observed = session.observed
        self.window = session.config["windows"][layer] or None
        self.is_prompt = session.kinds[-1] != GENERATED
        self.positions = np.array(state["in_play"])
        self.rows = np.array(state["computed"])
        always = session.always_kept()
        self.protected = np.array([not session.prunable(i) or i in always for i in state["in_play"]])
        self._session, self._state = session, state
        self._new = [i for i in state["computed"] if i >= first]

    def attention(self, rows: int = 1) -> np.ndarray:
        return np.stack([self._state["rows"][i] for i in self._new[-rows:]], axis=1)

    def queries(self, rows: int = 1) -> np.ndarray:
        return np.stack([self._session.queries[i] for i in self._new[-rows:]], axis=1)

    def keys(self) -> np.ndarray:
        return np.stack([self._session.K[self.layer][i] for i in self._state["in_play"]], axis=1)

    def values(self) -> np.ndarray:
        return np.stack([self._session.V[self.layer][i] for i in self._state["in_play"]], axis=1)

    def hidden(self) -> np.ndarray:
        return np.stack([self._state["hidden"][i] for i in self._state["computed"]])


class Reference:
    """One session: a context that grows with `forward`; K, V and Aux rows are stored by position.

    `margin` is the smallest relative gap, over all selections so far, between the scores of the last token
    kept and the first token dropped (for mass: between the sum reached and the sum required), and between the
    logits of the last expert chosen and the first left out. If it is within
    rounding error, the engine may rightly select other tokens, and a test must not compare the results.
    """

    def __init__(
        self,
        config: dict[str, Any],
        weights: dict[str, np.ndarray],
        pruning: dict[str, Any],
        policy: Any = None,
        kv: str = "f32",
    ) -> None:
        self.policy = policy  # an object with score, observe and layers, in place of the rule's scores
        self.kv = kv  # what K and V are rounded to
        self.config = config
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}
        self.pruning = pruning
        self.n_layers: int = config["n_layers"]
        self.ids: list[int] = []
        self.depths: list[int] = []
        self.kinds: list[int] = []
        self.K: list[dict[int, np.ndarray]] = [{} for _ in range(self.n_layers)]
        self.V: list[dict[int, np.ndarray]] = [{} for _ in range(self.n_layers)]
        self.aux: dict[int, np.ndarray] = {}
        self.remembered: dict[int, dict[int, float]] = {}  # scores in the stage after each layer, by position
        self.gone: set[int] = set()  # dropped for good, or left out of the context by the caller
        self.last_logits: np.ndarray | None = None
        self.last_pass = np.zeros((self.n_layers, 3), np.int32)
        self.last_trace: list[dict[str, Any]] = []
        self.margin = math.inf

    # ---- one pass ------------------------------------------------------------------------------------------

    def forward(self, ids: list[int], generated: bool = False) -> np.ndarray:
        self.last_logits = self.logits(self.run(ids, generated)[len(self.depths) - 1])
        return self.last_logits

    def surprisal(self, ids: list[int]) -> np.ndarray:
        """-ln p of each new prompt token given all tokens before it; NaN for the context's first token."""
        before, first = self.last_logits, len(self.depths)
        hidden = self.run(ids, generated=False)
        rows = [before, *(self.logits(hidden[first + k]) for k in range(len(ids)))]
        self.last_logits = rows[-1]
        return np.array([math.nan if row is None else -log_softmax(row)[i] for i, row in zip(ids, rows, strict=False)])

    def read(self, ids: list[int]) -> None:
        """The beginning of a prompt: a pass that ends after the first stage, where all of it waits."""
        stages = self.pruning["stages"]
        self.run(ids, generated=False, n_layers=stages[0][0] + 1 if stages else self.n_layers, early=True)
        self.last_logits = None

    def run(
        self, ids: list[int], generated: bool, n_layers: int | None = None, early: bool = False
    ) -> dict[int, np.ndarray]:
        """Runs one pass over all or the first n layers; returns the outputs of the last one by position."""
        first = len(self.depths)
        new = range(first, first + len(ids))
        self.ids += ids
        self.depths += [0] * len(ids)
        begin = first  # of the prompt, with what has been read of it
        while begin and self.kinds[begin - 1] == READ:
            begin -= 1
        asking = first if generated else begin
        self.kinds += [READ if early else GENERATED if generated else PROMPT] * len(ids)
        stages = {} if early else self.schedule(generated)
        frozen = generated and self.pruning["decode"] == "frozen" and not self.is_short
        embedding = self.weights["model.embed_tokens.weight"] * self.config["embedding_scale"]
        hidden = {i: embedding[token] for i, token in zip(new, ids, strict=True)}
        hidden = {i: state for i, state in hidden.items() if i not in self.gone}
        in_play = [i for i in range(len(self.depths)) if i not in self.gone]
        average = self.pruning["average"]
        by_layer: list[np.ndarray] = []
        layer_scores: list[dict[int, float]] = []  # of each layer so far in this pass, if `layers` asks
        last = self.pruning["layers"]
        if not generated:  # a pass over prompt tokens remembers its own scores alone, whatever its stages are
            self.remembered = {}
        self.last_trace = []
        self.observed: dict[int, Any] = {}
        self.last_pass = np.zeros((self.n_layers, 3), np.int32)
        n_layers = n_layers or self.n_layers
        n_revived = 0
        for layer in range(n_layers):
            if frozen:
                in_play = [i for i in in_play if i in new or i in self.K[layer]]
            computed = [i for i in in_play if i not in self.K[layer]]
            rows = self.begin_layer(layer, computed, in_play, hidden)
            for i in computed:
                self.depths[i] = layer + 1
            scores = None
            stay = in_play
            if self.policy:
                state = {"in_play": in_play, "computed": computed, "rows": rows, "hidden": hidden}
                stay, scores = self.ask(layer, asking, stages, state)
            elif average:
                by_layer.append(self.attention(rows, computed, layer, asking))
            elif last > 1 and stages:
                layer_scores.append(self.droppable(self.attention(rows, computed, layer, asking), in_play))
            if layer in stages and not self.policy:
                if average:
                    scores = np.mean(by_layer, axis=0)
                elif last > 1:  # what is in play here was in play in every layer below
                    counted = self.counted(layer_scores, layer)
                    scores = np.max([[score[i] for i in in_play] for score in counted], axis=0)
                else:
                    scores = self.attention(rows, computed, layer, asking)
                gain = self.pruning["gain"] if generated else 1.0
                scores = self.recall(layer, in_play, gain * self.complete(in_play, self.smooth(scores)))
                waiting = [generated and i in self.aux and self.depths[i] == layer + 1 for i in in_play]
                scores = scores * np.where(waiting, self.pruning["revival"], 1.0)
                stay = self.select(stages[layer][0], in_play, scores)
            self.last_pass[layer] = len(in_play), len(computed), n_revived
            self.note(layer, in_play, computed, scores)
            assert set(stay) <= set(in_play)
            ends = early and layer == n_layers - 1 < self.n_layers - 1
            for_good = layer in stages and stages[layer][1]
            for i in set(computed) - (set() if ends else set(stay)):
                waits = hidden.pop(i)
                if not for_good:
                    self.aux[i] = waits
            if ends:
                break
            revived = [] if frozen else [i for i in stay if i in self.aux and self.depths[i] == layer + 1]
            for i in revived:
                hidden[i] = self.aux.pop(i)
                rows[i] = self.attention_row(i, self.query(self.normed(hidden[i], layer), i, layer), layer, in_play)
            n_revived = len(revived)
            self.end_layer(layer, {i: rows[i] for i in stay if i in hidden}, in_play, hidden)
            if for_good:
                self.forget(set(in_play) - set(stay))
            in_play = stay
        if not early:
            self.kinds[begin:first] = [PROMPT] * (first - begin)
        self.check()
        return hidden

    def forget(self, dropped: set[int]) -> None:
        """Removes tokens from every cache permanently."""
        self.gone |= dropped
        for cache in (*self.K, *self.V, self.aux):
            for i in dropped & set(cache):
                del cache[i]

    @property
    def is_short(self) -> bool:
        """True if a pass runs dense because of the context's length."""
        return sum(map(self.prunable, range(len(self.kinds)))) < self.pruning["min_tokens"]

    def schedule(self, generated: bool) -> dict[int, Stage]:
        decode = self.pruning["decode"]
        if self.is_short or (generated and decode == "frozen"):
            return {}
        stages = self.pruning["stages"] if decode in ("same", "frozen") or not generated else decode
        return {layer: (rule, True in for_good) for layer, rule, *for_good in stages}

    # ---- the timeline --------------------------------------------------------------------------------------

    def fork(self) -> Reference:
        """A second session in the same state; only what never changes is shared."""
        fixed = (self.weights, self.config, self.pruning, self.policy)
        return copy.deepcopy(self, {id(value): value for value in fixed})

    def truncate(self, n: int) -> None:
        """Removes everything that belongs to positions from `n` on."""

        def first(by_position: dict[int, Any]) -> dict[int, Any]:
            return {i: value for i, value in by_position.items() if i < n}

        if n < len(self.ids):
            self.last_logits = None
        self.ids, self.depths, self.kinds = self.ids[:n], self.depths[:n], self.kinds[:n]
        self.K, self.V = [first(layer) for layer in self.K], [first(layer) for layer in self.V]
        self.aux = first(self.aux)
        self.remembered = {layer: first(scores) for layer, scores in self.remembered.items()}
        self.gone = {i for i in self.gone if i < n}

    # ---- the transformer layer -----------------------------------------------------------------------------

    def begin_layer(
        self, layer: int, computed: list[int], in_play: list[int], hidden: dict[int, np.ndarray]
    ) -> dict[int, np.ndarray]:
        """Computes K and V of the `computed` tokens; returns their attention rows (heads, in play)."""
        c = self.config
        self.queries: dict[int, np.ndarray] = {}  # of this layer
        prefix = f"model.layers.{layer}."
        for i in computed:
            x = self.normed(hidden[i], layer)
            v = self.linear(x, prefix + "self_attn.v_proj", c["qkv_bias"]).reshape(c["n_kv_heads"], c["head_dim"])
            assert i not in self.K[layer], "computed twice"
            self.queries[i] = self.query(x, i, layer)
            self.K[layer][i] = rounded(self.turned(x, "k", i, layer), self.kv)
            self.V[layer][i] = rounded(v, self.kv)
        return {i: self.attention_row(i, self.queries[i], layer, in_play) for i in computed}

    def normed(self, x: np.ndarray, layer: int) -> np.ndarray:
        name = f"model.layers.{layer}.input_layernorm.weight"
        return self.norm(x, name) if self.config["pre_norms"] else x

    def query(self, x: np.ndarray, i: int, layer: int) -> np.ndarray:
        growth = 1 + self.config["query_growth"] * math.log(1 + i // self.config["query_step"])
        return self.turned(x, "q", i, layer) * growth

    def attention_row(self, i: int, query: np.ndarray, layer: int, in_play: list[int]) -> np.ndarray:
        """(heads, in play)"""
        c = self.config
        group, window = c["n_heads"] // c["n_kv_heads"], c["windows"][layer] or math.inf
        keys = np.stack([np.repeat(self.K[layer][j], group, axis=0) for j in in_play], axis=1)
        seen = np.array([0 <= i - j < window for j in in_play])
        logits = np.einsum("hd,hjd->hj", query, keys) / math.sqrt(c["query_scalar"])
        logits = capped(logits, c["attention_cap"])
        logits = np.where(seen, logits, -np.inf)
        weight = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(weight / weight.sum(axis=1, keepdims=True))

    def end_layer(
        self, layer: int, rows: dict[int, np.ndarray], in_play: list[int], hidden: dict[int, np.ndarray]
    ) -> None:
        """Attention, by these rows, and FFN of the tokens that go on."""
        c, prefix = self.config, f"model.layers.{layer}."
        group = c["n_heads"] // c["n_kv_heads"]
        values = np.stack([np.repeat(self.V[layer][j], group, axis=0) for j in in_play], axis=1)
        for i, row in rows.items():
            attended = np.einsum("hj,hjd->hd", row, values).reshape(-1)
            attended = self.linear(attended, prefix + "self_attn.o_proj", c["o_bias"])
            if c["post_norms"]:
                attended = self.norm(attended, prefix + "post_attention_layernorm.weight")
            x = hidden[i] + attended
            before_ffn = "pre_feedforward_layernorm" if c["post_norms"] else "post_attention_layernorm"
            if c["parallel"]:
                y = self.normed(hidden[i], layer)
            else:
                y = self.norm(x, f"{prefix}{before_ffn}.weight") if c["pre_norms"] else x
            out = self.mix(y, prefix) if c["expert_layers"][layer] else self.ffn(y, prefix + "mlp.")
            if c["post_norms"]:
                out = self.norm(out, prefix + "post_feedforward_layernorm.weight")
            hidden[i] = x + out

    def turned(self, x: np.ndarray, name: str, position: int, layer: int) -> np.ndarray:
        """q or k of a token: (heads, head_dim), normed and rotated."""
        c, prefix = self.config, f"model.layers.{layer}.self_attn.{name}_"
        y = self.linear(x, prefix + "proj", c["qkv_bias"])
        if c["qk_norm"] and c["wide_qk_norm"]:
            y = self.norm(y, prefix + "norm.weight")
        y = y.reshape(-1, c["head_dim"])
        if c["qk_norm"] and not c["wide_qk_norm"] and not c["late_qk_norm"]:
            y = self.norm(y, prefix + "norm.weight")
        y = self.rope(y, position, layer)
        return self.norm(y, prefix + "norm.weight") if c["qk_norm"] and c["late_qk_norm"] else y

    def mix(self, x: np.ndarray, prefix: str) -> np.ndarray:
        """The weighted sum of what the experts with the greatest logits make of x."""
        logits = self.linear(x, prefix + "mlp.gate")
        best = sorted(range(len(logits)), key=lambda e: (-logits[e], e))
        chosen = sorted(best[: self.config["experts_per_token"]])
        if len(chosen) < len(best):
            gap = logits[best[len(chosen) - 1]] - logits[best[len(chosen)]]
            self.margin = min(self.margin, gap / np.abs(logits).max())
        weight = np.exp(logits - logits.max())
        weight /= (weight[chosen] if self.config["normed_experts"] else weight).sum()
        return np.asarray(sum(weight[e] * self.ffn(x, f"{prefix}mlp.experts.{e}.") for e in chosen))

    def ffn(self, x: np.ndarray, prefix: str) -> np.ndarray:
        gate, up = self.linear(x, prefix + "gate_proj"), self.linear(x, prefix + "up_proj")
        return self.linear(self.activation(gate) * up, prefix + "down_proj")

    def activation(self, x: np.ndarray) -> np.ndarray:
        if self.config["gelu"]:
            return np.asarray(x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
        return np.asarray(x / (1 + np.exp(-x)))

    def linear(self, x: np.ndarray, name: str, bias: bool = False) -> np.ndarray:
        y = self.weights[name + ".weight"] @ x
        return y + self.weights[name + ".bias"] if bias else y

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.weights[name] + self.config["norm_plus_one"]
        if self.config["layer_norm"]:
            x = x - np.mean(x, axis=-1, keepdims=True)
        normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["norm_eps"])
        return np.asarray(normed * weight)

    def rope(self, x: np.ndarray, position: int, layer: int) -> np.ndarray:
        """Rotates pairs of the first values of every head by the angles of the token's position: neighbours,
        or value i of the first half with value i of the second."""
        c = self.config
        row = c["layer_rope"][layer] + (len(self.depths) > c["short_context"])
        inv_freq, scale = np.reshape(c["inv_freq"], (len(c["rope_scale"]), -1))[row], c["rope_scale"][row]
        if not inv_freq.any():
            return x
        pairs = c["rotary_dim"] // 2
        angle = (np.float32(position) * inv_freq[:pairs].astype(np.float32)).astype(np.float64)
        cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
        first = slice(0, 2 * pairs, 2) if c["paired_rope"] else slice(0, pairs)
        second = slice(1, 2 * pairs, 2) if c["paired_rope"] else slice(pairs, 2 * pairs)
        turned = x.copy()
        turned[..., first] = x[..., first] * cos - x[..., second] * sin
        turned[..., second] = x[..., second] * cos + x[..., first] * sin
        return turned

    def logits(self, x: np.ndarray) -> np.ndarray:
        head = "model.embed_tokens.weight" if self.config["tied"] else "lm_head.weight"
        logits = self.weights[head] @ self.norm(x, "model.norm.weight") * self.config["logit_scale"]
        return capped(logits, self.config["logit_cap"])

    # ---- scores and selection ------------------------------------------------------------------------------

    def droppable(self, raw: np.ndarray, in_play: list[int]) -> dict[int, float]:
        """Scores of one layer, 0 for tokens that cannot be dropped in this pass."""
        always = self.always_kept()
        free = [self.prunable(i) and i not in always for i in in_play]
        return dict(zip(in_play, np.where(free, raw, 0.0).tolist(), strict=True))

    def counted(self, scores: list[dict[int, float]], layer: int) -> list[dict[int, float]]:
        """The scores of the last `layers` layers that see at least as far as this one."""
        windows = [window or math.inf for window in self.config["windows"]]
        last = range(max(0, layer - self.pruning["layers"] + 1), layer + 1)
        return [scores[index] for index in last if windows[index] >= windows[layer]]

    def recall(self, layer: int, in_play: list[int], new: np.ndarray) -> np.ndarray:
        """The larger of the new scores and `memory` times those remembered, which it replaces.

        A token out of play has the new score 0: its remembered score fades and is not lost. In a pass over
        prompt tokens nothing is remembered at this point, so that the new scores are the scores.
        """
        score = {i: self.pruning["memory"] * old for i, old in self.remembered.get(layer, {}).items()}
        for i, fresh in zip(in_play, new.tolist(), strict=True):
            score[i] = float(np.maximum(fresh, score.get(i, 0.0)))  # unlike max, it hands NaN on
        self.remembered[layer] = score
        return np.array([score[i] for i in in_play])

    def attention(self, rows: dict[int, np.ndarray], computed: list[int], layer: int, first: int) -> np.ndarray:
        asking = [i for i in computed if i >= first][-self.pruning["queries"] :]
        shares = np.array([rows[i] for i in asking])
        heavy, head = self.pruning["head"] or (None, None)
        if layer == heavy:
            shares[:, head] = [HEAD_WEIGHT * levelled(row) for row in shares[:, head]]
        if self.pruning["pooling"] == "rms":
            return np.asarray(((shares**2).mean(axis=1) ** 0.5).max(axis=0))
        return np.asarray(shares.mean(axis=(0, 1)))

    def ask(
        self, layer: int, first: int, stages: dict[int, Stage], state: dict[str, Any]
    ) -> tuple[list[int], np.ndarray | None]:
        """The tokens that a policy keeps after this layer, and its scores; it observes the layer first."""

        def count(stage: int) -> int:
            """Prompt tokens that the stage keeps."""
            always = self.always_kept()
            forced = sum(self.prunable(i) and i in always for i in in_play)
            wanted = math.ceil(stages[stage][0] * sum(map(self.prunable, range(len(self.depths)))))
            return max(forced, min(wanted, sum(map(self.prunable, in_play))))

        in_play = state["in_play"]
        dropping = [p for p in stages if count(p) < sum(map(self.prunable, in_play))]
        if any(p - self.policy.layers < layer < p for p in dropping):
            view = ReferenceView(self, layer, first, None, state)
            self.observed[layer] = self.policy.observe(view)
        if layer not in dropping:
            return in_play, None
        view = ReferenceView(self, layer, first, count(layer), state)
        returned = np.asarray(self.policy.score(view))
        if returned.dtype.kind == "f":
            return self.select(stages[layer][0], in_play, returned), returned
        kept = set(returned.tolist()) | set(view.positions[view.protected].tolist())
        return [i for i in in_play if i in kept], np.isin(view.positions, returned).astype(float)

    def smooth(self, raw: np.ndarray) -> np.ndarray:
        half = self.pruning["smooth"] // 2
        return np.array([raw[max(0, k - half) : k + half + 1].mean() for k in range(len(raw))])

    def complete(self, in_play: list[int], scores: np.ndarray) -> np.ndarray:
        """Each score, the largest of those that its word has within REACH tokens on each side."""
        if not self.pruning["words"]:
            return scores
        begins, ends = ([self.config["word_parts"][token] & bit for token in self.ids] for bit in (1, 2))
        first = [k for k, i in enumerate(in_play) if not (i and i - 1 in in_play and begins[i] and ends[i - 1])]
        words = [range(a, b) for a, b in zip(first, [*first[1:], len(in_play)], strict=True)]
        return np.array([max(scores[j] for j in word if abs(j - k) <= REACH) for word in words for k in word])

    def select(self, rule: Rule, in_play: list[int], scores: np.ndarray) -> list[int]:
        """The tokens kept: the unprunable and the highest-scoring others, smaller positions first."""
        if np.isnan(scores).any():
            raise ValueError("NaN score")
        score = dict(zip(in_play, scores.tolist(), strict=True))
        pool = [i for i in in_play if self.prunable(i)]
        always = self.always_kept()
        forced = [i for i in pool if i in always]
        free = sorted((i for i in pool if i not in always), key=lambda i: (-score[i], i))
        n = sum(self.prunable(i) for i in range(len(self.depths)))
        if isinstance(rule, tuple):
            mass, keep_min, keep_max = rule
            count = self.count_mass(mass, [score[i] for i in forced + free], len(forced))
            count = min(max(count, math.ceil(keep_min * n)), math.ceil(keep_max * n))
        else:
            count = math.ceil(rule * n)
        count = max(len(forced), min(len(pool), count)) - len(forced)
        if 0 < count < len(free):
            lowest, rejected = score[free[count - 1]], score[free[count]]
            if lowest != 0:  # zeros lie outside the window, so that ties between them are exact, as those of a word are
                others = (
                    {score[i] for i in free} - {lowest} if lowest == rejected and self.pruning["words"] else {rejected}
                )
                gap = min((abs(lowest - other) for other in others), default=math.inf)
                self.margin = min(self.margin, gap / abs(lowest))
        kept = set(forced) | set(free[:count])
        return [i for i in in_play if i in kept or not self.prunable(i)]

    def count_mass(self, mass: float, scores: list[float], forced: int) -> int:
        """How many of `scores`, in order and at least `forced`, reach the share `mass` of their total."""
        total = sum(scores)
        threshold = mass * total
        reached, count = sum(scores[:forced]), forced
        while True:
            if total > 0:  # else no prompt token lies within the window, and both sums are exactly 0
                self.margin = min(self.margin, abs(reached - threshold) / total)
            if reached >= threshold or count == len(scores):
                return count
            reached, count = reached + scores[count], count + 1

    def prunable(self, i: int) -> bool:
        return self.kinds[i] != GENERATED or self.pruning["prune_generated"]

    def always_kept(self) -> set[int]:
        prompt = [i for i, kind in enumerate(self.kinds) if kind != GENERATED]
        sink, window = self.pruning["sink"], self.pruning["window"]
        spans = {i for a, b in self.pruning["protect"] for i in range(a, b)}
        return {len(self.depths) - 1, *prompt[:sink], *prompt[max(0, len(prompt) - window) :], *spans}

    # ---- reports and invariants ----------------------------------------------------------------------------

    def note(self, layer: int, in_play: list[int], computed: list[int], scores: np.ndarray | None) -> None:
        """Adds the layer to the trace; layers with the same sets and no stage between them share an entry."""
        run = self.last_trace[-1] if self.last_trace else None
        if run and run["scores"] is None and (run["in_play"], run["computed"]) == (in_play, computed):
            run.update(last_layer=layer, scores=scores)
        else:
            sets = {"in_play": in_play, "computed": computed, "scores": scores}
            self.last_trace.append({"first_layer": layer, "last_layer": layer, **sets})

    def check(self) -> None:
        """Asserts the invariants of the caches that hold after every pass."""
        for layer in range(self.n_layers):
            assert (
                set(self.K[layer])
                == set(self.V[layer])
                == {i for i, d in enumerate(self.depths) if d > layer} - self.gone
            )
        assert set(self.aux) == {i for i, d in enumerate(self.depths) if d < self.n_layers} - self.gone

    @property
    def n_prompt(self) -> int:
        return len(self.kinds) - self.kinds.count(GENERATED)

    @property
    def computed(self) -> float:
        depths = [d for d, kind in zip(self.depths, self.kinds, strict=True) if kind != GENERATED]
        return sum(depths) / (self.n_prompt * self.n_layers) if depths else 0.0

    @property
    def reached_top(self) -> float:
        depths = [d for d, kind in zip(self.depths, self.kinds, strict=True) if kind != GENERATED]
        return depths.count(self.n_layers) / self.n_prompt if depths else 0.0
