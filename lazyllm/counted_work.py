"""Counted work: the floating-point operations of a pass, by the number of tokens in each layer."""

import numpy as np

from lazyllm.checkpoints.config import ModelConfig


def bare_flops(config: ModelConfig, last_pass: np.ndarray) -> int:
    """Operations of a pass without scores, by the tokens in play and computed in each layer, as in
    `Session.last_pass`."""
    in_play, computed = last_pass[:, 0].tolist(), last_pass[:, 1].tolist()
    going_on = [*computed[1:], min(1, computed[-1])]
    layers = zip(range(config.n_layers), in_play, computed, going_on, strict=True)
    return sum(layer_flops(config, *counts) for counts in layers) + 2 * config.hidden * config.vocab


def layer_flops(config: ModelConfig, layer: int, in_play: int, computed: int, rows: int) -> int:
    """Operations of one layer, without scores: keys and values of the `computed` tokens, all else of the last
    `rows` of those in play."""
    width = config.n_heads * config.head_dim
    kv_row = 4 * config.hidden * config.n_kv_heads * config.head_dim
    ffn_row = 6 * config.hidden * config.ffn
    if config.expert_layers[layer]:
        ffn_row = 2 * config.hidden * (config.n_experts + 3 * config.experts_per_token * config.expert_ffn)
    other_row = 4 * config.hidden * width + ffn_row
    window = min(config.windows[layer] or in_play, in_play)
    # the last rows see `window` keys each; a row before them sees one key less than the next row
    whole_windows = min(rows, in_play - window)
    rest = rows - whole_windows
    pairs = whole_windows * window + rest * (2 * (in_play - rows) + rest + 1) // 2
    return computed * kv_row + rows * other_row + pairs * 4 * width


def score_flops(config: ModelConfig, in_play: int, rows: int = 1, window: int = 0) -> int:
    """Operations of one layer's scores by the last `rows`, of at most `window` tokens if there is one."""
    return rows * min(window or in_play, in_play) * 2 * config.n_heads * config.head_dim
